"""Bounds on the age of training data. Batch s trains version s − 1; a sample's lag is (s − 1) − its oldest version."""

from dataclasses import dataclass

PACE_GROWTH, PACE_DECAY = 1.5, 0.97
PLENTY = 0.5
SPARE = 0.15
"""Share of a batch that is left free of expected episodes: when more come than expected, the surplus grows too old."""


@dataclass(frozen=True, slots=True)
class StalenessLimits:
    """`max_lag` bounds the age of samples, `run_ahead` the batches sent before the trainer has used the last ones."""

    batch_size: int
    max_lag: int
    run_ahead: int
    max_steps: int


def lag(step: int, oldest_version: int) -> int:
    """Count the versions between what batch `step` trains and what sampled its oldest token; 0 for no sampled token."""
    return max(0, step - 1 - oldest_version)


def too_old(step: int, oldest_version: int, max_lag: int) -> bool:
    """Tell whether a sample is too old for batch `step` and all later ones."""
    return lag(step, oldest_version) > max_lag


def last_chance(step: int, version: int, max_lag: int) -> bool:
    """Tell whether batch `step` is the last one that samples of `version` are not too old for."""
    return lag(step, version) <= max_lag < lag(step + 1, version)


def may_send(step: int, newest_version: int, limits: StalenessLimits) -> bool:
    """Tell whether batch `step` isn't too far ahead of the newest version that the trainer has announced."""
    return step - 1 - newest_version <= limits.run_ahead


def usable_batches(step: int, version: int, limits: StalenessLimits) -> int:
    """Count the batches, from `step` on, that rollouts which start now at `version` could still go into."""
    return max(0, min(version + limits.max_lag + 1, limits.max_steps) - step + 1)


def may_open_group(step: int, version: int, ready: int, coming: float, pace: float, limits: StalenessLimits) -> bool:
    """Tell whether one more group is wanted, with `ready` episodes waiting for batch `step` and `coming` expected.

    There is never more expected than batches can use, nor than `pace` batches.
    """
    usable = float(usable_batches(step, version, limits))
    if usable > 1:
        usable -= SPARE
    return ready + coming < limits.batch_size * min(pace, usable)


def next_pace(pace: float, *, trainer_starved: bool, waited_share: float, limits: StalenessLimits) -> float:
    """Return how many batches' worth of episodes to have under way: as few as keep the trainer busy.

    More when the trainer had run out of batches, less when this one was complete long before the trainer wanted it
    (`waited_share` of the time since the last one). In between lies the slack that uneven episodes need.
    """
    if trainer_starved:
        pace *= PACE_GROWTH
    elif waited_share > PLENTY:
        pace *= PACE_DECAY
    return min(max(pace, 1.0), limits.max_lag + 1.0)
