"""Losses that drop tokens whose probability moved too far: dppo, ipo."""

import torch
from torch import Tensor

from headway.trainer.losses.base import LossInputs, PerToken


def dppo(inputs: LossInputs, *, threshold: float, kl_coef: float) -> tuple[Tensor, PerToken]:
    """Policy gradient by importance ratio, without tokens that moved far enough in the direction of their advantage."""
    moved_T = _moved(inputs)
    drop_T = torch.where(inputs.advantages_T > 0, moved_T > threshold, moved_T < -threshold)
    return masked_surrogate(inputs.log_ratio_T, inputs.advantages_T, drop_T, kl_coef), {"masked": drop_T}


def ipo(inputs: LossInputs, *, threshold: float, kl_coef: float) -> tuple[Tensor, PerToken]:
    """Like dppo, with tokens dropped whichever way they moved."""
    drop_T = _moved(inputs).abs() > threshold
    return masked_surrogate(inputs.log_ratio_T, inputs.advantages_T, drop_T, kl_coef), {"masked": drop_T}


def masked_surrogate(log_ratio_T: Tensor, advantages_T: Tensor, drop_T: Tensor, kl_coef: float) -> Tensor:
    """-A·r where a token is kept, 0 where it is dropped, plus kl_coef·(log r)² everywhere."""
    # The ratio of a dropped token may overflow, and 0 * inf would poison the gradient: so it is masked before exp.
    surrogate_T = advantages_T.masked_fill(drop_T, 0.0) * log_ratio_T.masked_fill(drop_T, 0.0).exp()
    return kl_coef * log_ratio_T.square() - surrogate_T


def _moved(inputs: LossInputs) -> Tensor:
    """π - μ."""
    return (inputs.logprobs_T.exp() - inputs.old_logprobs_T.exp()).detach()
