"""The three components of the loss: rl, cross-entropy (ce), and distillation towards a reference (ref_kl).

Each is summed over its tokens and divided by the number of its tokens in the *global* batch, so that no rank's
tokens weigh more than another's and the components don't dilute each other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.batches import ComponentCounts
from headway.trainer.losses.base import LossFunction, LossInputs, PerToken
from headway.trainer.losses.policy import masked_surrogate

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
    logprobs_N: Tensor,
    entropy_N: Tensor,
    tokens: LossTokens,
    counts: ComponentCounts,
    rl_loss: LossFunction,
    entropy_coef: float = 0.0,
) -> tuple[Tensor, Sums]:
    """Compute this micro-batch's share of the global loss, and sums for the metrics.

    The tokens of the rl loss earn `entropy_coef` times their entropy. The loss depends on `logprobs_N` even where every
    component is empty, so that backward always runs.
    """
    sums = _sampled_sums(logprobs_N.detach(), entropy_N.detach(), tokens)
    loss = logprobs_N.sum() * 0.0
    components: list[tuple[str, int, Tensor, Callable[[], tuple[Tensor, PerToken]]]] = [
        ("rl", counts.rl, tokens.rl_weight_N, lambda: rl_loss(_rl_inputs(logprobs_N, tokens))),
        ("ce", counts.ce, tokens.ce_weight_N, lambda: (-logprobs_N, {})),
        ("ref_kl", counts.ref_kl, tokens.ref_kl_weight_N, lambda: ref_kl(logprobs_N, tokens)),
    ]
    for name, count, weight_N, component in components:
        if count == 0:
            continue
        loss_N, metrics = component()
        counted_N = weight_N != 0
        # where, not a product: 0 * inf of a token that doesn't count must not poison the sum.
        part = torch.where(counted_N, weight_N * loss_N, 0.0).sum() / count
        loss = loss + part
        sums[f"loss/{name}"] = part.detach()
        for metric, value_N in metrics.items():
            sums[f"{name}/{metric}"] = torch.where(counted_N, value_N.detach().float(), 0.0).sum() / count
    if entropy_coef and counts.rl:
        bonus = torch.where(tokens.rl_weight_N != 0, entropy_N, 0.0).sum() * (entropy_coef / counts.rl)
        loss = loss - bonus
        sums["loss/entropy"] = -bonus.detach()
    sums["loss"] = loss.detach()
    return loss, sums


def _rl_inputs(logprobs_N: Tensor, tokens: LossTokens) -> LossInputs:
    return LossInputs(logprobs_N, tokens.old_logprobs_N, tokens.advantages_N, tokens.rl_weight_N, tokens.segments_N)


def ref_kl(logprobs_N: Tensor, tokens: LossTokens) -> tuple[Tensor, PerToken]:
    """Policy gradient (dppo's) with the log-ratio of reference and policy as the advantage."""
    log_ratio_N = logprobs_N - tokens.old_logprobs_N
    advantages_N = (tokens.ref_logprobs_N - logprobs_N).detach()
    drop_N = (logprobs_N.exp() - tokens.old_logprobs_N.exp()).detach() < -REF_KL_THRESHOLD
    loss_N = masked_surrogate(log_ratio_N, advantages_N, drop_N, REF_KL_COEF)
    return loss_N, {"masked": drop_N, "kl": -advantages_N}


def _sampled_sums(logprobs_N: Tensor, entropy_N: Tensor, tokens: LossTokens) -> Sums:
    """Sum over the sampled tokens, whatever the loss: entropy, and the KL between trainer and engine (k3)."""
    # r - log r - 1 is the square of a small number: in float32 it would drown in the rounding of 1.
    log_ratio_N = logprobs_N.double() - tokens.old_logprobs_N
    mismatch_N = log_ratio_N.expm1() - log_ratio_N
    return {
        "tokens/sampled": tokens.sampled_N.sum(),
        "sampled/mismatch_kl": torch.where(tokens.sampled_N, mismatch_N, 0.0).sum(),
        "sampled/entropy": torch.where(tokens.sampled_N, entropy_N, 0.0).sum(),
    }
