"""REINFORCE weighted by the importance ratio, which is bounded in different ways: aipo, tis, cispo, icepop."""

from torch import Tensor

from headway.trainer.losses.base import LossInputs, PerToken


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
