"""RL losses: one function per `trainer.loss.type`, all with one signature over flat tensors.

T runs over tokens, μ is the policy that sampled them, π the live one, r = π/μ. A loss returns its value per token
(not yet weighted) and, as metrics, per-token quantities that the caller averages over the counted tokens.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.config.trainer import CustomLoss, Loss
from headway.core.errors import UsageError

PerToken = Mapping[str, Tensor]


class LossFunction(Protocol):
    def __call__(
        self, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, weights_T: Tensor, segments_T: Tensor
    ) -> tuple[Tensor, PerToken]:
        """`weights_T` is not 0 where a token counts; `segments_T` are the indices of the tokens' samples.

        Where a weight is 0 the loss may be anything finite: the caller multiplies by the weight.
        """
        ...


def dppo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    threshold: float = 0.2,
    kl_coef: float = 1e-3,
) -> tuple[Tensor, PerToken]:
    """Policy gradient by importance ratio, without tokens whose probability already moved far enough."""
    moved_T = (logprobs_T.exp() - old_logprobs_T.exp()).detach()
    drop_T = torch.where(advantages_T > 0, moved_T > threshold, moved_T < -threshold)
    return _masked_gradient(logprobs_T - old_logprobs_T, advantages_T, drop_T, kl_coef)


def ipo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    threshold: float = 0.1,
    kl_coef: float = 1e-3,
) -> tuple[Tensor, PerToken]:
    """Like dppo, with tokens dropped whichever way they moved."""
    moved_T = (logprobs_T.exp() - old_logprobs_T.exp()).detach()
    return _masked_gradient(logprobs_T - old_logprobs_T, advantages_T, moved_T.abs() > threshold, kl_coef)


def _masked_gradient(
    log_ratio_T: Tensor, advantages_T: Tensor, drop_T: Tensor, kl_coef: float
) -> tuple[Tensor, PerToken]:
    return masked_surrogate(log_ratio_T, advantages_T, drop_T, kl_coef), {"masked": drop_T}


def masked_surrogate(log_ratio_T: Tensor, advantages_T: Tensor, drop_T: Tensor, kl_coef: float) -> Tensor:
    """-A·r where a token is kept, 0 where it is dropped, plus kl_coef·(log r)² everywhere."""
    # The ratio of a dropped token may overflow, and 0 * inf would poison the gradient: so it is masked before exp.
    surrogate_T = advantages_T.masked_fill(drop_T, 0.0) * log_ratio_T.masked_fill(drop_T, 0.0).exp()
    return kl_coef * log_ratio_T.square() - surrogate_T


def aipo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    delta: float = 4.0,
) -> tuple[Tensor, PerToken]:
    """REINFORCE with importance weights truncated at `delta`."""
    ratio_T = (logprobs_T - old_logprobs_T).exp().detach()
    return -advantages_T * ratio_T.clamp(max=delta) * logprobs_T, {"masked": ratio_T > delta}


def ppo_clip(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> tuple[Tensor, PerToken]:
    """The pessimistic of the plain and the clipped surrogate."""
    return _clipped((logprobs_T - old_logprobs_T).exp(), advantages_T, eps_low, eps_high)


def _clipped(ratio_T: Tensor, advantages_T: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, PerToken]:
    plain_T = advantages_T * ratio_T
    clipped_T = advantages_T * ratio_T.clamp(1 - eps_low, 1 + eps_high)
    return -torch.minimum(plain_T, clipped_T), {"masked": (clipped_T < plain_T).detach()}


def cispo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> tuple[Tensor, PerToken]:
    """REINFORCE with clipped importance weights: every token keeps a gradient."""
    ratio_T = (logprobs_T - old_logprobs_T).exp().detach()
    clipped_T = ratio_T.clamp(1 - eps_low, 1 + eps_high)
    return -advantages_T * clipped_T * logprobs_T, {"masked": clipped_T != ratio_T}


def gspo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> tuple[Tensor, PerToken]:
    """ppo_clip with one ratio per sample: the geometric mean over its counted tokens."""
    counted_T = (weights_T != 0).to(logprobs_T.dtype)
    samples = int(segments_T.max()) + 1 if len(segments_T) else 0
    zeros_S = logprobs_T.new_zeros(samples)
    tokens_S = zeros_S.index_add(0, segments_T, counted_T).clamp(min=1)
    sums_S = zeros_S.index_add(0, segments_T, (logprobs_T - old_logprobs_T) * counted_T)
    return _clipped((sums_S / tokens_S).exp()[segments_T], advantages_T, eps_low, eps_high)


def tis(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    cap: float = 2.0,
) -> tuple[Tensor, PerToken]:
    """Truncated importance sampling."""
    return aipo(logprobs_T, old_logprobs_T, advantages_T, weights_T, segments_T, delta=cap)


def icepop(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> tuple[Tensor, PerToken]:
    """Importance sampling without the tokens on which the two policies disagree in either direction."""
    ratio_T = (logprobs_T - old_logprobs_T).exp().detach()
    drop_T = (ratio_T < low) | (ratio_T > high)
    return -advantages_T * ratio_T.masked_fill(drop_T, 0.0) * logprobs_T, {"masked": drop_T}


LOSSES: dict[str, Callable[..., tuple[Tensor, PerToken]]] = {
    "dppo": dppo,
    "ipo": ipo,
    "aipo": aipo,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "gspo": gspo,
    "tis": tis,
    "icepop": icepop,
}


def make_loss(settings: Loss) -> LossFunction:
    """The function that the settings name, with their numbers bound."""
    if isinstance(settings, CustomLoss):
        return partial(_import_loss(settings.path), **settings.args)
    return partial(LOSSES[settings.type], **settings.model_dump(exclude={"type"}))


def _import_loss(path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    if not name:
        raise UsageError(f'trainer.loss.path: expected "package.module:function" (got "{path}")')
    here = str(Path.cwd())
    if here not in sys.path:  # console scripts do not have the current folder on their path
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f'trainer.loss.path: cannot import "{path}": {error}') from error
    if not callable(function):
        raise UsageError(f'trainer.loss.path: "{path}" is not a function')
    return function  # type: ignore[no-any-return]  # callable() narrows to a function returning object
