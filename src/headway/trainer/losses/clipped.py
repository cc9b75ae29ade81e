"""Losses with PPO's clipped objective: one ratio per token (ppo_clip), or per sample (gspo)."""

import torch
from torch import Tensor

from headway.trainer.losses.base import LossInputs, PerToken


def ppo_clip(inputs: LossInputs, *, eps_low: float, eps_high: float) -> tuple[Tensor, PerToken]:
    """The lower of the plain and the clipped surrogate (PPO, with DAPO's two bounds)."""
    return _clipped(inputs.log_ratio_T.exp(), inputs.advantages_T, eps_low, eps_high)


def gspo(inputs: LossInputs, *, eps_low: float, eps_high: float) -> tuple[Tensor, PerToken]:
    """ppo_clip with one ratio per sample (GSPO): the geometric mean over its counted tokens."""
    segments_T = inputs.segments_T
    counted_T = (inputs.weights_T != 0).to(inputs.logprobs_T.dtype)
    samples = int(segments_T.max()) + 1 if len(segments_T) else 0
    zeros_S = inputs.logprobs_T.new_zeros(samples)
    tokens_S = zeros_S.index_add(0, segments_T, counted_T).clamp(min=1)
    sums_S = zeros_S.index_add(0, segments_T, inputs.log_ratio_T * counted_T)
    return _clipped((sums_S / tokens_S).exp()[segments_T], inputs.advantages_T, eps_low, eps_high)


def _clipped(ratio_T: Tensor, advantages_T: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, PerToken]:
    plain_T = advantages_T * ratio_T
    clipped_T = advantages_T * ratio_T.clamp(1 - eps_low, 1 + eps_high)
    return -torch.minimum(plain_T, clipped_T), {"masked": (clipped_T < plain_T).detach()}
