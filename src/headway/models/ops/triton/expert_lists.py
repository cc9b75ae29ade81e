"""Lists of the choices that fell on each expert. A program lists those of a group of tokens, for all experts: programs
count nothing in common, so that nothing must be set to zero before."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.experts.lists import GROUP, ExpertLists

_GROUP: tl.constexpr = tl.constexpr(GROUP)
_LEAST_GROUPS = 16
"""Groups that kernels are compiled for at the least: small steps share one compiled kernel."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def store_lists(which, group, choices, counts, groups, experts, K: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """`which` is (GROUP, WIDTH): 1 + the place of an expert among a token's choices, 0 where it is none of them."""
    token = group * _GROUP + tl.arange(0, _GROUP)
    e = tl.arange(0, WIDTH)
    chosen = (which > 0).to(tl.int32)
    place = e[None, :] * (groups * _GROUP) + group * _GROUP + tl.cumsum(chosen, 0) - 1
    tl.store(choices + place, token[:, None] * K + which - 1, which > 0)
    tl.store(counts + e * groups + group, tl.sum(chosen, 0), e < experts)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def ends_of_groups(counts, expert, groups, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Choices of an expert in each group and those before it."""
    g = tl.arange(0, GROUPS)
    return tl.cumsum(tl.load(counts + expert * groups + g, g < groups, other=0), 0)


@triton.jit
def listed_choices(choices, ends, r, count, expert, groups):  # type: ignore[no-untyped-def]
    """The choices that stand at places `r` of an expert's list; 0 for places behind its `count`."""
    earlier = ends[None, :] <= r[:, None]
    group = tl.sum(earlier.to(tl.int32), 1)
    before = tl.max(tl.where(earlier, ends[None, :], 0), 1)
    place = (expert * groups + group) * _GROUP + r - before
    return tl.load(choices + place, mask=r < count, other=0)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _list_kernel(chosen, choices, counts, tokens, groups, experts, K: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    group = tl.program_id(0)
    token = group * _GROUP + tl.arange(0, _GROUP)
    e = tl.arange(0, WIDTH)
    which = tl.zeros([_GROUP, WIDTH], tl.int32)
    for place in tl.static_range(K):
        expert = tl.load(chosen + token * K + place, token < tokens, other=-1).to(tl.int32)
        which = tl.where(e[None, :] == expert[:, None], place + 1, which)
    store_lists(which, group, choices, counts, groups, experts, K, WIDTH)


def expert_lists(experts_Tk: Tensor, experts: int) -> ExpertLists:
    tokens, k = experts_Tk.shape
    lists = empty_lists(tokens, experts, experts_Tk.device)
    groups = lists.counts_EG.shape[1]
    if groups:
        _list_kernel[(groups,)](
            experts_Tk.contiguous(), *lists, tokens, groups, experts, K=k, WIDTH=triton.next_power_of_2(experts)
        )
    return lists


def empty_lists(tokens: int, experts: int, device: torch.device) -> ExpertLists:
    """Lists for a kernel to fill."""
    groups = triton.cdiv(tokens, GROUP)
    choices_EN = torch.empty((experts, groups * GROUP), dtype=torch.int32, device=device)
    return ExpertLists(choices_EN, torch.empty((experts, groups), dtype=torch.int32, device=device))


def compiled_groups(groups: int) -> int:
    """The number of groups, a power of two, that the kernels over lists are compiled for."""
    return max(_LEAST_GROUPS, int(triton.next_power_of_2(groups)))
