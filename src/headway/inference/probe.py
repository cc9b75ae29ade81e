"""Comparison of an engine's results on a probe with the trainer's, and the layer where they first differ."""

import math
from dataclasses import dataclass

from headway.core.protocol import WeightProbe


@dataclass(frozen=True)
class Tolerance:
    """Differences that rounding explains. `logprobs`: root mean square between served and the trainer's logprobs, whose
    standard deviation is at most 1. `stream`: relative difference between two engines' residual streams."""

    logprobs: float
    stream: float


TOLERANCES = {
    "float32": Tolerance(5e-5, 1e-6),
    "float16": Tolerance(0.03, 1e-3),
    "bfloat16": Tolerance(0.1, 8e-3),
    "fp8": Tolerance(0.4, 0.05),
}
"""By the coarser of the two precisions. Kernels add up in different orders, which shows in bfloat16: there vLLM on an
H200 was 0.01 away from the trainer's model, with 220M random weights, and 5e-7 in float32. Rounding is relative: a
pretrained model of 135M, whose logprobs have a far larger standard deviation, was 0.1 away."""

_JUMP = 8.0
"""Rounding grows by small factors from layer to layer; wrong weights show as a jump."""


@dataclass(frozen=True)
class Served:
    """An engine's results on a probe's tokens. `stream` is as in the probe, or None where it could not be recorded."""

    logprobs: list[float]
    dtype: str
    stream: list[float] | None = None


def mismatch(probe: WeightProbe, served: Served) -> str | None:
    """Describe how served weights differ from the trainer's; None where they agree.

    Nothing is compared where one side computes in a precision without a tolerance.
    """
    known = [TOLERANCES[dtype] for dtype in (probe.dtype, served.dtype) if dtype in TOLERANCES]
    if len(known) < 2:
        return None
    tolerance = max(known, key=lambda one: one.logprobs)
    apart = _rms([a - b for a, b in zip(probe.logprobs, served.logprobs, strict=True)])
    allowed = tolerance.logprobs * max(1.0, _spread(probe.logprobs))
    if apart <= allowed:
        return None
    return (
        f"served logprobs of its probe are {apart:.2g} away from the trainer's "
        f"({allowed:.2g} is rounding); {_suspect(probe, served, tolerance.stream)}"
    )


def _suspect(probe: WeightProbe, served: Served, rounding: float) -> str:
    """Name the layer with the largest jump of the difference between residual streams over all layers before."""
    if served.stream is None or len(served.stream) != len(probe.stream):
        return "the layer at fault can't be told: the engine's residual stream can't be recorded"
    before, largest, place = rounding, _JUMP, -1
    for index, (ours, theirs) in enumerate(zip(served.stream, probe.stream, strict=True)):
        off = abs(ours - theirs) / max(abs(theirs), 1e-30) if math.isfinite(ours) else math.inf
        if off / before > largest:
            largest, place = off / before, index
        before = max(before, off)
    if place < 0:
        return "the head is suspect: up to it the residual stream agrees"
    name = _names(len(probe.stream))[place]
    return (
        f"{name} is suspect: after it the residual stream is {served.stream[place]:.6g}, "
        f"the trainer's is {probe.stream[place]:.6g}"
    )


def _names(places: int) -> list[str]:
    return ["the embedding", *(f"layer {layer}" for layer in range(places - 2)), "the final norm"]


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / max(1, len(values)))


def _spread(values: list[float]) -> float:
    """Compute the standard deviation."""
    middle = sum(values) / max(1, len(values))
    return _rms([value - middle for value in values])
