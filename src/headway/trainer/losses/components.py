"""The three components of the loss: rl, cross-entropy (ce), and distillation towards a reference (ref_kl).

Each is summed over its tokens and divided by the number of its tokens in the *global* batch, so that no rank's
tokens weigh more than another's and the components don't dilute each other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.batches import ComponentCounts
from headway.trainer.losses.base import LossFunction, LossInputs, PerToken
from headway.trainer.losses.masked import masked_surrogate

REF_KL_THRESHOLD = 0.2
REF_KL_COEF = 1e-3


@dataclass(slots=True)
class LossTokens:
    """The tokens that any component counts, N of them, as flat tensors on one device.

    `segments` are the indices of their samples within the micro-batch.
    """

    sampled_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    rl_weight_N: Tensor
    ce_weight_N: Tensor
    ref_kl_weight_N: Tensor
    ref_logprobs_N: Tensor
    segments_N: Tensor


Sums = dict[str, Tensor]
"""Sums over tokens on this rank, as scalars. The metric `name` is sum[name] over all ranks / its denominator."""


def total_loss(
    logprobs_N: Tensor, entropy_N: Tensor, tokens: LossTokens, counts: ComponentCounts, rl_loss: LossFunction
) -> tuple[Tensor, Sums]:
    """Compute this micro-batch's share of the global loss, and sums for the metrics.

    The loss depends on `logprobs_N` even where every component is empty, so that backward always runs.
    """
    sums = _sampled_sums(logprobs_N.detach(), entropy_N.detach(), tokens)
    loss = logprobs_N.sum() * 0.0
    for name, weight_N, (loss_N, metrics), count in (
        ("rl", tokens.rl_weight_N, _rl(logprobs_N, tokens, rl_loss), counts.rl),
        ("ce", tokens.ce_weight_N, (-logprobs_N, {}), counts.ce),
        ("ref_kl", tokens.ref_kl_weight_N, ref_kl(logprobs_N, tokens), counts.ref_kl),
    ):
        if count == 0:
            continue
        counted_N = weight_N != 0
        # where, not a product: 0 * inf of a token that doesn't count must not poison the sum.
        component = torch.where(counted_N, weight_N * loss_N, 0.0).sum() / count
        loss = loss + component
        sums[f"loss/{name}"] = component.detach()
        for metric, value_N in metrics.items():
            sums[f"{name}/{metric}"] = torch.where(counted_N, value_N.detach().float(), 0.0).sum() / count
    sums["loss"] = loss.detach()
    return loss, sums


def _rl(logprobs_N: Tensor, tokens: LossTokens, rl_loss: LossFunction) -> tuple[Tensor, PerToken]:
    inputs = LossInputs(logprobs_N, tokens.old_logprobs_N, tokens.advantages_N, tokens.rl_weight_N, tokens.segments_N)
    return rl_loss(inputs)


def ref_kl(logprobs_N: Tensor, tokens: LossTokens) -> tuple[Tensor, PerToken]:
    """Policy gradient whose advantage is how much likelier the reference finds the token."""
    log_ratio_N = logprobs_N - tokens.old_logprobs_N
    advantages_N = (tokens.ref_logprobs_N - logprobs_N).detach()
    drop_N = (logprobs_N.exp() - tokens.old_logprobs_N.exp()).detach() < -REF_KL_THRESHOLD
    loss_N = masked_surrogate(log_ratio_N, advantages_N, drop_N, REF_KL_COEF)
    return loss_N, {"masked": drop_N, "kl": -advantages_N}


def _sampled_sums(logprobs_N: Tensor, entropy_N: Tensor, tokens: LossTokens) -> Sums:
    """Sums over the sampled tokens, whatever the loss: entropy, and the KL between trainer and engine."""
    # r - log r - 1 is the square of a small number: in float32 it would drown in the rounding of 1.
    log_ratio_N = logprobs_N.double() - tokens.old_logprobs_N
    mismatch_N = log_ratio_N.expm1() - log_ratio_N
    return {
        "tokens/sampled": tokens.sampled_N.sum(),
        "sampled/mismatch_kl": torch.where(tokens.sampled_N, mismatch_N, 0.0).sum(),
        "sampled/entropy": torch.where(tokens.sampled_N, entropy_N, 0.0).sum(),
    }
