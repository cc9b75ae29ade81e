"""A loss of one's own: per-token tensors to a loss per token, and metrics."""

from torch import Tensor

from headway.trainer.losses.base import LossInputs


def soft(inputs: LossInputs, *, beta: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """−A·min(r, β), with the share of tokens that β cuts as the metric `rl/cut`."""
    ratio_T = inputs.log_ratio_T.exp()
    return -inputs.advantages_T * ratio_T.clamp(max=beta), {"cut": ratio_T > beta}
