"""Ratios of the trainer's to the engine's probabilities, token by token."""

import math

from headway.core.records import read_trained_logprobs
from headway.core.runs import RunPaths
from headway.core.samples import BranchKey


def trained_logprobs(paths: RunPaths, step: int, branch: BranchKey) -> dict[int, float]:
    """Return the trainer's logprobs by position in the branch; empty where it kept none of them."""
    found: dict[int, float] = {}
    for sample in read_trained_logprobs(paths, step):
        if sample.key == branch:
            places = [at for start, length in sample.spans for at in range(start, start + length)]
            found |= dict(zip(places, sample.logprobs.tolist(), strict=False))
    return found


def ratio(trained: float | None, sampled: float | None) -> float | None:
    """Return how much likelier the trainer found a token than the engine that sampled it; None where unknown."""
    if trained is None or sampled is None:
        return None
    value = math.exp(min(trained - sampled, 100.0))
    return value if math.isfinite(value) else None
