"""The choices that fell on each expert, in lists: what experts of a decode step go over."""

from typing import NamedTuple

import torch
from torch import Tensor

from headway.models.ops.registry import Op, in_triton_serving

GROUP = 16
"""Tokens whose choices are listed together, by one program of a kernel."""
FEW_TOKENS = 1024
"""Beyond, experts have so many rows each that products are bound by arithmetic, where sorted rows are better."""


class ExpertLists(NamedTuple):
    """Token t's j-th choice is number t * k + j. Group g are the tokens from g * GROUP on: expert e's choices among
    them are the first `counts[e, g]` of those that stand in `choices[e]` from g * GROUP on, in the order of tokens."""

    choices_EN: Tensor
    counts_EG: Tensor


@Op
def expert_lists(experts_Tk: Tensor, experts: int) -> ExpertLists:
    """List the choices (T, k) of each of so many experts, in int32; no token chooses an expert twice. Places behind a
    group's last choice may hold anything."""
    tokens, k = experts_Tk.shape
    groups, device = -(-tokens // GROUP), experts_Tk.device
    chosen_TEk = experts_Tk.unsqueeze(1) == torch.arange(experts, device=device)[:, None]
    chosen_NE = torch.zeros((groups * GROUP, experts), dtype=torch.bool, device=device)
    chosen_NE[:tokens] = chosen_TEk.any(-1)
    numbers_NE = torch.zeros((groups * GROUP, experts), dtype=torch.int32, device=device)
    numbers_NE[:tokens] = torch.arange(tokens, device=device)[:, None] * k + chosen_TEk.int().argmax(-1)
    # Stable, and those that chose the expert first.
    order_GLE = (~chosen_NE).view(groups, GROUP, experts).int().argsort(dim=1, stable=True)
    choices_GLE = numbers_NE.view(groups, GROUP, experts).gather(1, order_GLE)
    counts_GE = chosen_NE.view(groups, GROUP, experts).sum(1, dtype=torch.int32)
    return ExpertLists(choices_GLE.flatten(0, 1).t().contiguous(), counts_GE.t().contiguous())


expert_lists.backend("triton", takes=in_triton_serving)("headway.models.ops.triton.expert_lists:expert_lists")
