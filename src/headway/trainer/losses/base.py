"""The contract of RL losses: what a loss function receives and what it returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

PerToken = Mapping[str, Tensor]
"""Per-token quantities by name, which the caller averages over the counted tokens into metrics."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The T tokens of a micro-batch that need a loss, as flat tensors on one device.

    π is the policy being trained, μ the one that sampled the tokens. Gradients flow through `logprobs_T` alone.
    """

    logprobs_T: Tensor
    """log π."""
    old_logprobs_T: Tensor
    """log μ."""
    advantages_T: Tensor
    weights_T: Tensor
    """Not 0 where a token counts. The caller multiplies by it, so elsewhere the loss may be anything finite."""
    segments_T: Tensor
    """The index of each token's sample within the micro-batch."""

    @property
    def log_ratio_T(self) -> Tensor:  # noqa: N802  # the suffix is its shape
        """log π/μ, with its gradient."""
        return self.logprobs_T - self.old_logprobs_T


class LossFunction(Protocol):
    def __call__(self, inputs: LossInputs) -> tuple[Tensor, PerToken]:
        """Return the loss per token, not yet weighted, and metrics."""
        ...


def sample_means(values_T: Tensor, inputs: LossInputs) -> Tensor:
    """Return, for each token, the mean of the values over those tokens of its sample that count; 0 where none does."""
    segments_T = inputs.segments_T
    counted_T = (inputs.weights_T != 0).to(values_T.dtype)
    samples = int(segments_T.max()) + 1 if len(segments_T) else 0
    zeros_S = values_T.new_zeros(samples)
    tokens_S = zeros_S.index_add(0, segments_T, counted_T).clamp(min=1)
    sums_S = zeros_S.index_add(0, segments_T, values_T * counted_T)
    return (sums_S / tokens_S)[segments_T]
