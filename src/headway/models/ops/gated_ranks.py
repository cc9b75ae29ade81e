"""The second half of low-rank adapters in serving, where every token has a gate for the ranks of all adapters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.models.ops.registry import Op, cast, in_triton_serving

TILE = 64
"""Outputs that a program of the kernel computes: those of each layer must be a multiple."""
_MOST_LAYERS, _MOST_RANKS = 3, 512


@Op
def add_gated_ranks(out_TO: Tensor, ranks_TN: Tensor, gate_TR: Tensor, ups: Sequence[Tensor]) -> Tensor:
    """out + (ranks * gate) @ up for each layer's up (R, its outputs): layers side by side in `out`, and their ranks
    side by side in `ranks`."""
    outs = torch.split(out_TO, [up.shape[1] for up in ups], dim=1)
    ranks = torch.split(ranks_TN, gate_TR.shape[1], dim=1)
    each = [
        torch.addmm(out, (own * gate_TR).to(out.dtype), cast(up, out.dtype))
        for out, own, up in zip(outs, ranks, ups, strict=True)
    ]
    return each[0] if len(each) == 1 else torch.cat(each, 1)


def _in_tiles(out_TO: Tensor, ranks_TN: Tensor, gate_TR: Tensor, ups: Sequence[Tensor]) -> bool:
    return (
        in_triton_serving(out_TO)
        and out_TO.dtype is torch.bfloat16
        and len(ups) <= _MOST_LAYERS
        and gate_TR.shape[1] <= _MOST_RANKS
        and all(up.shape[1] % TILE == 0 and up.dtype is out_TO.dtype for up in ups)
    )


add_gated_ranks.backend("triton", takes=_in_tiles)("headway.models.ops.triton.gated_ranks:add_gated_ranks")
