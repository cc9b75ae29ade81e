"""Gated ranks of adapters times their second halves, added to the outputs of up to three layers: one kernel."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.gated_ranks import TILE

_RANKS = 64
"""Ranks that a program takes at a time."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    base, ranks, gate, up0, up1, up2, out, rows, base_stride, ranks_stride, gate_stride, stride0, stride1, stride2,
    out_stride, tiles0, tiles1, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    up, stride, first, layer = up0, stride0, 0, 0
    if tile >= tiles1:
        up, stride, first, layer = up2, stride2, tiles1, 2
    elif tile >= tiles0:
        up, stride, first, layer = up1, stride1, tiles0, 1
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    inside = row < rows
    column = tl.arange(0, COLUMNS)[None, :]
    total = tl.load(base + row * base_stride + tile * COLUMNS + column, inside, other=0.0).to(tl.float32)
    for begin in range(0, size, RANKS):
        rank = begin + tl.arange(0, RANKS)
        known = rank < size
        own = tl.load(ranks + row * ranks_stride + layer * size + rank[None, :], inside & known[None, :], other=0.0)
        scale = tl.load(gate + row * gate_stride + rank[None, :], inside & known[None, :], other=0.0)
        part = tl.load(
            up + rank[:, None].to(tl.int64) * stride + (tile - first) * COLUMNS + column, known[:, None], other=0.0
        )
        total = tl.dot((own.to(tl.float32) * scale).to(part.dtype), part, total, input_precision="ieee")
    tl.store(out + row * out_stride + tile * COLUMNS + column, total, inside)


def add_gated_ranks(out_TO: Tensor, ranks_TN: Tensor, gate_TR: Tensor, ups: Sequence[Tensor]) -> Tensor:
    """Layers that are not there have no tiles."""
    rows, added = len(out_TO), torch.empty(out_TO.shape, dtype=out_TO.dtype, device=out_TO.device)
    layers = [*ups, *[ups[-1]] * (3 - len(ups))]
    ends = [sum(up.shape[1] for up in ups[: n + 1]) // TILE for n in range(3)]
    block = 16 if rows <= 16 else 32 if rows <= 64 else 64
    _kernel[(ends[2], triton.cdiv(rows, block))](
        out_TO, ranks_TN, gate_TR, *layers, added, rows, out_TO.stride(0), ranks_TN.stride(0), gate_TR.stride(0),
        *(up.stride(0) for up in layers), added.stride(0), ends[0], ends[1], gate_TR.shape[1], block, TILE, _RANKS,
    )  # fmt: skip
    return added
