"""The RL losses, by the way they treat tokens whose probability moved.

dppo and ipo drop them. aipo, tis, cispo and icepop are REINFORCE weighted by the importance ratio, which is bounded in
different ways. ppo_clip and gspo have PPO's clipped objective, with one ratio per token or per sample.
"""

import math

import torch
from torch import Tensor

from headway.trainer.losses.base import LossInputs, PerToken, sample_means


def dppo(inputs: LossInputs, *, threshold: float, kl_coef: float, cap: float | None) -> tuple[Tensor, PerToken]:
    """Policy gradient by importance ratio, of at most `cap`, without tokens that moved far enough in the direction of
    their advantage."""
    moved_T = _moved(inputs)
    drop_T = torch.where(inputs.advantages_T > 0, moved_T > threshold, moved_T < -threshold)
    return masked_surrogate(inputs.log_ratio_T, inputs.advantages_T, drop_T, kl_coef, cap), {"masked": drop_T}


def ipo(inputs: LossInputs, *, threshold: float, kl_coef: float) -> tuple[Tensor, PerToken]:
    """Like dppo, with tokens dropped whichever way they moved."""
    drop_T = _moved(inputs).abs() > threshold
    return masked_surrogate(inputs.log_ratio_T, inputs.advantages_T, drop_T, kl_coef), {"masked": drop_T}


def masked_surrogate(
    log_ratio_T: Tensor, advantages_T: Tensor, drop_T: Tensor, kl_coef: float, cap: float | None = None
) -> Tensor:
    """-A·min(r, cap) where a token is kept, 0 where it is dropped, plus kl_coef·(log r)² everywhere. Tokens whose ratio
    is capped keep a gradient."""
    # The ratio of a dropped token may overflow, and 0 * inf would poison the gradient: so it is masked before exp.
    kept_T = log_ratio_T.masked_fill(drop_T, 0.0)
    if cap is not None:
        kept_T = kept_T - (kept_T.detach() - math.log(cap)).clamp(min=0)
    return kl_coef * log_ratio_T.square() - advantages_T.masked_fill(drop_T, 0.0) * kept_T.exp()


def _moved(inputs: LossInputs) -> Tensor:
    """π - μ."""
    return (inputs.logprobs_T.exp() - inputs.old_logprobs_T.exp()).detach()


def aipo(inputs: LossInputs, *, delta: float) -> tuple[Tensor, PerToken]:
    """Weights truncated at `delta`."""
    ratio_T = _ratio(inputs)
    return _reinforce(inputs, ratio_T.clamp(max=delta)), {"masked": ratio_T > delta}


def tis(inputs: LossInputs, *, cap: float) -> tuple[Tensor, PerToken]:
    """Truncated importance sampling: aipo under its other name."""
    return aipo(inputs, delta=cap)


def cispo(inputs: LossInputs, *, eps_low: float, eps_high: float) -> tuple[Tensor, PerToken]:
    """Weights clipped on both sides: every token keeps a gradient."""
    ratio_T = _ratio(inputs)
    clipped_T = ratio_T.clamp(1 - eps_low, 1 + eps_high)
    return _reinforce(inputs, clipped_T), {"masked": clipped_T != ratio_T}


def icepop(inputs: LossInputs, *, low: float, high: float) -> tuple[Tensor, PerToken]:
    """No tokens on which the two policies disagree in either direction."""
    ratio_T = _ratio(inputs)
    drop_T = (ratio_T < low) | (ratio_T > high)
    return _reinforce(inputs, ratio_T.masked_fill(drop_T, 0.0)), {"masked": drop_T}


def _ratio(inputs: LossInputs) -> Tensor:
    return inputs.log_ratio_T.exp().detach()


def _reinforce(inputs: LossInputs, importance_T: Tensor) -> Tensor:
    return -inputs.advantages_T * importance_T * inputs.logprobs_T


def ppo_clip(
    inputs: LossInputs, *, eps_low: float, eps_high: float, delta: float | None = None
) -> tuple[Tensor, PerToken]:
    """The lower of the plain and the clipped surrogate (PPO, with DAPO's two bounds).

    `delta` bounds the ratio of the plain one, which alone counts where a token with a negative advantage has become
    likelier (two-sided clipping of INTELLECT-2).
    """
    log_ratio_T = inputs.log_ratio_T
    if delta is not None:
        # Before exp: a ratio that overflows would poison the gradient even where it is cut.
        log_ratio_T = log_ratio_T.clamp(max=math.log(delta))
    loss_T, metrics = _clipped(log_ratio_T.exp(), inputs.advantages_T, eps_low, eps_high)
    if delta is None:
        return loss_T, metrics
    return loss_T, {"masked": metrics["masked"] | (inputs.log_ratio_T.detach() > math.log(delta))}


def gspo(inputs: LossInputs, *, eps_low: float, eps_high: float) -> tuple[Tensor, PerToken]:
    """ppo_clip with one ratio per sample (GSPO): the geometric mean over its counted tokens."""
    ratio_T = sample_means(inputs.log_ratio_T, inputs).exp()
    return _clipped(ratio_T, inputs.advantages_T, eps_low, eps_high)


def _clipped(ratio_T: Tensor, advantages_T: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, PerToken]:
    plain_T = advantages_T * ratio_T
    clipped_T = advantages_T * ratio_T.clamp(1 - eps_low, 1 + eps_high)
    return -torch.minimum(plain_T, clipped_T), {"masked": (clipped_T < plain_T).detach()}
