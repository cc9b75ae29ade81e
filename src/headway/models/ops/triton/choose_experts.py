"""The choice of a router, in one kernel: scores, the k best, gates."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.choose_experts import TINY, Choice


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _choose_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    logits, bias, gates, chosen, stride, count, scale, tiny, K: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, WIDTH)
    real = e < count
    x = tl.load(logits + token * stride + e, mask=real, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-x))
    else:
        scores = tl.exp(x - tl.max(x, 0))
        scores = scores / tl.sum(scores, 0)
    ranked = scores
    if BIASED:
        ranked = scores + tl.load(bias + e, mask=real, other=0.0).to(tl.float32)
    ranked = tl.where(real, ranked, float("-inf"))
    slot = tl.arange(0, SLOTS)
    picked = tl.zeros([SLOTS], tl.float32)
    numbers = tl.zeros([SLOTS], tl.int32)
    for choice in tl.static_range(K):
        best = tl.argmax(ranked, 0)
        picked = tl.where(slot == choice, tl.sum(tl.where(e == best, scores, 0.0), 0), picked)
        numbers = tl.where(slot == choice, best, numbers)
        ranked = tl.where(e == best, float("-inf"), ranked)
    if NORMALIZE:
        picked = picked / (tl.sum(picked, 0) + tiny)
    place = token * K + slot
    tl.store(gates + place, picked * scale, mask=slot < K)
    tl.store(chosen + place, numbers.to(tl.int64), mask=slot < K)


def choose_experts(
    logits_TE: Tensor, bias_E: Tensor | None, given_Tk: Tensor | None, choice: Choice
) -> tuple[Tensor, Tensor]:
    (tokens, experts), k = logits_TE.shape, choice.k
    gates = torch.empty((tokens, k), dtype=torch.float32, device=logits_TE.device)
    chosen = torch.empty((tokens, k), dtype=torch.int64, device=logits_TE.device)
    bias = logits_TE if bias_E is None else bias_E
    _choose_kernel[(tokens,)](
        logits_TE, bias, gates, chosen, logits_TE.stride(0), experts, choice.scale, TINY, K=k,
        WIDTH=triton.next_power_of_2(experts), SLOTS=triton.next_power_of_2(k), SIGMOID=choice.score == "sigmoid",
        BIASED=bias_E is not None, NORMALIZE=choice.normalize, num_warps=1,
    )  # fmt: skip
    return gates, chosen
