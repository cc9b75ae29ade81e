"""The choice of a router, in one kernel: scores, the k best, gates, and the experts' lists of who chose them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.experts.choose import TINY, Choice, Routing
from headway.models.ops.experts.lists import FEW_TOKENS, GROUP
from headway.models.ops.triton.expert_lists import empty_lists, store_lists

_GROUP: tl.constexpr = tl.constexpr(GROUP)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _choose_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    logits, stride, bias, gates, chosen, choices, counts, tokens, groups, experts, scale, tiny, K: tl.constexpr,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr, NORMALIZE: tl.constexpr,
    LIST: tl.constexpr,
):  # fmt: skip
    """A program chooses for a group of tokens."""
    group = tl.program_id(0)
    token = group * _GROUP + tl.arange(0, _GROUP)
    e = tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None]
    real = (e < experts)[None, :]
    at = logits + token.to(tl.int64)[:, None] * stride + e[None, :]
    x = tl.load(at, inside & real, other=0.0).to(tl.float32)
    x = tl.where(real, x, float("-inf"))
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-x))
    else:
        scores = tl.exp(x - tl.max(x, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    ranked = scores
    if BIASED:
        ranked = scores + tl.load(bias + e, e < experts, other=0.0).to(tl.float32)[None, :]
    ranked = tl.where(real, ranked, float("-inf"))
    slot = tl.arange(0, SLOTS)[None, :]
    picked = tl.zeros([_GROUP, SLOTS], tl.float32)
    numbers = tl.zeros([_GROUP, SLOTS], tl.int32)
    which = tl.zeros([_GROUP, WIDTH], tl.int32)
    # Not unrolled, which would take long to compile and gain nothing: a choice waits for the one before.
    for choice in range(K):
        best = tl.argmax(ranked, 1)
        hit = e[None, :] == best[:, None]
        picked = tl.where(slot == choice, tl.sum(tl.where(hit, scores, 0.0), 1)[:, None], picked)
        numbers = tl.where(slot == choice, best[:, None], numbers)
        which = tl.where(hit, choice + 1, which)
        ranked = tl.where(hit, float("-inf"), ranked)
    if NORMALIZE:
        picked = picked / (tl.sum(picked, 1)[:, None] + tiny)
    place = token.to(tl.int64)[:, None] * K + slot
    tl.store(gates + place, picked * scale, inside & (slot < K))
    tl.store(chosen + place, numbers.to(tl.int64), inside & (slot < K))
    if LIST:
        store_lists(tl.where(inside, which, 0), group, choices, counts, groups, experts, K, WIDTH)


def choose_experts(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    given_Tk: Tensor | None,
    choice: Choice,
    dtype: torch.dtype = torch.float32,
) -> Routing:
    tokens, experts = logits_TE.shape
    routing = _empty(tokens, experts, choice, dtype, logits_TE.device)
    if tokens:
        bias = logits_TE if bias_E is None else bias_E
        _choose_kernel[(triton.cdiv(tokens, GROUP),)](
            logits_TE, logits_TE.stride(0), bias, *_pointers(routing), tokens, triton.cdiv(tokens, GROUP), experts,
            choice.scale, TINY, **_constants(experts, choice, bias_E is not None, routing),
            num_warps=4 if experts <= 256 else 8,
        )  # fmt: skip
    return routing


def _empty(tokens: int, experts: int, choice: Choice, dtype: torch.dtype, device: torch.device) -> Routing:
    gates = torch.empty((tokens, choice.k), dtype=dtype, device=device)
    chosen = torch.empty((tokens, choice.k), dtype=torch.int64, device=device)
    return Routing(gates, chosen, empty_lists(tokens, experts, device) if tokens <= FEW_TOKENS else None)


def _pointers(routing: Routing) -> tuple[Tensor, ...]:
    gates, chosen, lists = routing
    return gates, chosen, *(lists or (chosen, chosen))


def _constants(experts: int, choice: Choice, biased: bool, routing: Routing) -> dict[str, int | bool]:
    return {
        "K": choice.k,
        "WIDTH": max(16, int(triton.next_power_of_2(experts))),
        "SLOTS": int(triton.next_power_of_2(choice.k)),
        "SIGMOID": choice.score == "sigmoid",
        "BIASED": biased,
        "NORMALIZE": choice.normalize,
        "LIST": routing.lists is not None,
    }
