"""Numbers of replies against those of a trusted model: logprobs, draws and ranks, over all tokens of a contribution.

The bounds are measured (benchmarks/swarm.py), per precision: float32 engines agree to many digits, bfloat16 ones round
differently in a pass over one token and in one over many.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headway.swarm.messages.orders import Precision
from headway.swarm.trust.checks.base import Evidence
from headway.swarm.trust.rescored import Floats


@dataclass(frozen=True, slots=True)
class LogprobBounds:
    """Differences of logprobs: their mean over tokens, and the largest."""

    mean: float
    largest: float


@dataclass(frozen=True, slots=True)
class DrawBounds:
    """The mean, over tokens, of the probability by which a draw misses its token, and the largest such miss."""

    mean: float
    largest: float


LOGPROB_BOUNDS: Mapping[Precision, LogprobBounds] = {
    "float32": LogprobBounds(mean=2e-5, largest=3e-4),
    "bfloat16": LogprobBounds(mean=0.02, largest=0.15),
}
DRAW_BOUNDS: Mapping[Precision, DrawBounds] = {
    "float32": DrawBounds(mean=1e-5, largest=2e-4),
    "bfloat16": DrawBounds(mean=1e-3, largest=0.03),
}
LEAST_CHANCE = 1e-6
"""Ranks that honest draws have with a smaller chance than this are refused."""


class Logprobs:
    """Refuses logprobs that the weights do not give: other, older or quantized weights, and edited numbers."""

    name = "logprobs"

    def __init__(self, bounds: Mapping[Precision, LogprobBounds] = LOGPROB_BOUNDS) -> None:
        self._bounds = bounds

    def refuse(self, evidence: Evidence) -> str | None:
        bounds, rescored = self._bounds[evidence.contribution.precision], evidence.rescored
        difference = np.abs(rescored.claimed - rescored.logprobs)
        mean, largest = float(difference.mean()), float(difference.max())
        # A number that is not finite fits nothing.
        if mean <= bounds.mean and largest <= bounds.largest:
            return None
        return f"logprobs differ by {mean:.3g} in the mean and {largest:.3g} at most"


class SeededDraws:
    """Refuses tokens that the order's seeds do not draw: edited or chosen tokens, other rollouts, another temperature,
    other weights. For engines that draw as the embedded one does."""

    name = "draws"

    def __init__(self, bounds: Mapping[Precision, DrawBounds] = DRAW_BOUNDS) -> None:
        self._bounds = bounds

    def refuse(self, evidence: Evidence) -> str | None:
        bounds, missed = self._bounds[evidence.contribution.precision], evidence.rescored.missed
        mean, largest = float(missed.mean()), float(missed.max())
        if mean <= bounds.mean and largest <= bounds.largest:
            return None
        return f"the seeds draw other tokens: missed by {mean:.3g} in the mean and {largest:.3g} at most"


class Ranks:
    """Refuses tokens that are too likely, or too unlikely, for draws from the distribution: greedy decoding, another
    temperature. It needs no seeds, and so serves for engines that draw in ways of their own.

    The share of probability on likelier tokens, plus half the token's own, is 1/2 on average for honest draws from any
    distribution. Bernstein's inequality bounds the chance that their sum is as far off as it is: it holds for few
    tokens, and for models that are almost certain, where sums are far from normal.
    """

    name = "ranks"

    def __init__(self, least_chance: float = LEAST_CHANCE) -> None:
        self._least_chance = least_chance

    def refuse(self, evidence: Evidence) -> str | None:
        excess, chance = lean_of(evidence.rescored.rank, evidence.rescored.rank_variance)
        if chance >= self._least_chance:
            return None
        side = "likely" if excess < 0 else "unlikely"
        return f"tokens are too {side}: a chance of at most {chance:.1g} for honest draws"


def lean_of(rank: Floats, variance: Floats) -> tuple[float, float]:
    """Return by how much ranks exceed those of honest draws in all, and a bound on the chance of that."""
    excess = float((rank - 0.5).sum())
    # A single rank is off by 1/2 at most.
    exponent = excess**2 / 2 / (float(variance.sum()) + abs(excess) / 6 + 1e-12)
    return excess, min(1.0, 2 * math.exp(-exponent))
