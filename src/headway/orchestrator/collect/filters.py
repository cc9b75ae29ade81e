"""Filters of scored groups: nothing without signal is trained, and no samples that only teach bad habits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.algorithms.base import Group, Rollout
from headway.base.errors import PermanentError
from headway.base.imports import check_call, load_object
from headway.config.orchestrator import CertainRunFilter, FilterSettings, RareTokenFilter
from headway.core.samples import Sample

NGRAM = 8
Gate = Callable[[Group], bool]
RolloutFilter = Callable[[Rollout], bool]
"""Returns whether a rollout is kept."""


@dataclass(slots=True)
class Verdict:
    """`samples` are what is left, `episodes` how many rollouts they come from, `dropped` counts samples by cause.

    `cause` says why the whole group is refused.
    """

    samples: list[Sample] = field(default_factory=list)
    episodes: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    cause: str | None = None


def judge(
    group: Group,
    settings: FilterSettings,
    seq_len: int,
    gates: Sequence[Gate] = (),
    own: Sequence[RolloutFilter] = (),
) -> Verdict:
    """Apply all filters, your `own` among them, then the gates, which may refuse the group as it is."""
    verdict = Verdict()
    if settings.zero_advantage and not any(has_signal(sample) for _, sample in group.samples()):
        verdict.cause = "zero_advantage"
        return verdict
    for rollout in group.rollouts:
        kept = []
        refused = next((_name(keep) for keep in own if not keep(rollout)), None)
        for sample in rollout.samples:
            trace = rollout.episode.traces[sample.trace]
            cause = "truncated" if settings.truncated and trace.truncated else _sample_cause(sample, settings, seq_len)
            cause = refused or cause
            if cause is None:
                kept.append(sample)
            else:
                verdict.dropped[cause] = verdict.dropped.get(cause, 0) + 1
        verdict.samples += kept
        verdict.episodes += bool(kept)
    if not verdict.samples:
        verdict.cause = max(verdict.dropped, key=lambda cause: verdict.dropped[cause], default="empty")
    elif not all(gate(group) for gate in gates):
        verdict.cause = "gate"
    return verdict


def has_signal(sample: Sample) -> bool:
    """Tell whether any token changes any loss. Advantages within rounding of 0 don't."""
    rl = (sample.rl_weight != 0) & (np.abs(sample.advantages) > 1e-9)
    return bool(rl.any() or sample.ce_weight.any() or sample.ref_kl_weight.any())


def _sample_cause(sample: Sample, settings: FilterSettings, seq_len: int) -> str | None:
    if len(sample) > seq_len:
        return "too_long"
    if not sample.counted.any():
        return "empty"
    if settings.gibberish is not None and mean_logprob(sample) < settings.gibberish:
        return "gibberish"
    if settings.repetition is not None and repeated_share(sample.token_ids[sample.sampled]) > settings.repetition:
        return "repetition"
    if settings.rare_tokens is not None and has_rare_token(sample, settings.rare_tokens):
        return "rare_tokens"
    if settings.certain_run is not None and has_certain_run(sample, settings.certain_run):
        return "certain_run"
    return None


def has_rare_token(sample: Sample, settings: RareTokenFilter) -> bool:
    """Tell whether the policy sampled a token that is rare and was very unlikely."""
    rare = (sample.token_ids > settings.token_id) & (sample.logprobs < settings.logprob)
    return bool((rare & sample.sampled).any())


def has_certain_run(sample: Sample, settings: CertainRunFilter) -> bool:
    """Tell whether the policy sampled so many tokens in a row with near certainty. Other tokens between are skipped."""
    certain = sample.logprobs[sample.sampled] > math.log(settings.probability)
    breaks = np.flatnonzero(~certain)
    return bool(np.diff(breaks, prepend=-1, append=len(certain)).max() > settings.length)


def mean_logprob(sample: Sample) -> float:
    """Average over what the policy sampled; 0 where it sampled nothing."""
    return float(sample.logprobs[sample.sampled].mean()) if sample.sampled.any() else 0.0


def repeated_share(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> float:
    """Return the share of 8-grams that occurred before; 0 for texts too short to have two."""
    count = len(tokens) - NGRAM + 1
    if count < 2:
        return 0.0
    windows = np.lib.stride_tricks.sliding_window_view(tokens, NGRAM)
    return 1.0 - len(np.unique(windows, axis=0)) / count


def load_gates(paths: Sequence[str]) -> list[Gate]:
    """Import functions of a group that say whether it may be trained."""
    return [_load_test(path, "orchestrator.gates", "headway.gates", "group") for path in paths]


def load_filters(paths: Sequence[str]) -> list[RolloutFilter]:
    """Import functions of a rollout that say whether to keep it."""
    return [_load_test(path, "orchestrator.filters.custom", "headway.filters", "rollout") for path in paths]


def _load_test(path: str, what: str, group: str, given: str) -> Callable[..., bool]:
    """Import a function of `given` that says yes or no. Raises PermanentError when it says anything else."""
    function = load_object(path, what, group)
    check_call(function, path, what, {}, given=[given])

    def test(value: object) -> bool:
        said = function(value)
        if not isinstance(said, bool | np.bool_):
            raise PermanentError(f'{what} "{path}" returned {said!r}; it must return True or False')
        return bool(said)

    test.__name__ = _name(function)
    return test


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)
