"""Products of experts in FP8: rows lie in the order of their experts, and a tile has rows of one of them."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headway.models.ops.fp8.blocks import BLOCK

_SIDE: tl.constexpr = tl.constexpr(BLOCK)
_MANY_ROWS = 128
"""Rows of an expert, on average, above which the time is that of products and not of reading weights."""
_ALIGNED = 16
"""Numbers in a row of what the hardware copies by descriptors: a multiple of this."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def tiles_of_experts(ends, experts, EXPERTS: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of experts, where their rows start and end, and how many tiles of M rows they fill."""
    e = tl.arange(0, EXPERTS)
    end = tl.load(ends + e, e < experts, other=0)
    start = tl.load(ends + e - 1, (e > 0) & (e < experts), other=0)
    return e, start, end, tl.where(e < experts, (end - start + M - 1) // M, 0)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def rows_of_tile(ends, experts, tile, EXPERTS: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of a tile of M rows, `experts` for none; the tile's first row, and the end of the expert's."""
    e, start, end, tiles = tiles_of_experts(ends, experts, EXPERTS, M)
    after = tl.cumsum(tiles, 0)
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    mine = e == expert
    before = tl.sum(tl.where(mine, after - tiles, 0), 0)
    first = tl.sum(tl.where(mine, start, 0), 0) + (tile - before) * M
    return expert, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _few_rows_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    a, a_scales, b, b_scales, ends, out, outputs, depth, a_scales_row, a_scales_step, experts,
    EXPERTS: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The transposed product of a tile: the weight's rows are the long side of the hardware's instruction."""
    expert, first, rows = rows_of_tile(ends, experts, tl.program_id(1), EXPERTS, M)
    if expert < experts:
        m = first + tl.arange(0, M)
        n = tl.program_id(0) * N + tl.arange(0, N)
        k = tl.arange(0, _SIDE)
        blocks = tl.cdiv(depth, _SIDE)
        inside = tl.where(m < rows, m, rows - 1).to(tl.int64)
        b_nk = b + (expert.to(tl.int64) * outputs + n % outputs)[:, None] * depth + k[None, :]
        a_km = a + inside[None, :] * depth + k[:, None]
        a_scale = a_scales + inside * a_scales_row
        # Outputs are whole blocks, of which a tile is a part. Scales are read a block ahead, as in `fp8_matmul`.
        b_scale = b_scales + (expert * (outputs // _SIDE) + tl.program_id(0) * N // _SIDE) * blocks
        scale_m, scale_n = tl.load(a_scale), tl.load(b_scale)
        total = tl.zeros([N, M], tl.float32)
        for block in range(blocks):
            at = block * _SIDE
            ahead = tl.minimum(block + 1, blocks - 1)
            next_m, next_n = tl.load(a_scale + ahead * a_scales_step), tl.load(b_scale + ahead)
            if EVEN:
                weight, row = tl.load(b_nk + at), tl.load(a_km + at)
            else:
                weight = tl.load(b_nk + at, (k < depth - at)[None, :], other=0.0)
                row = tl.load(a_km + at, (k < depth - at)[:, None], other=0.0)
            part = tl.dot(weight, row)
            total += part * (scale_m * scale_n)[None, :]
            scale_m, scale_n = next_m, next_n
        place = out + m.to(tl.int64)[None, :] * outputs + n[:, None]
        tl.store(place, total, (m < rows)[None, :] & (n < outputs)[:, None])


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _many_rows_kernel(  # type: ignore[no-untyped-def]  # arguments are descriptors and pointers to the compiler
    a, a_scales, b, b_scales, ends, out, outputs, depth, a_scales_row, a_scales_step, experts,
    EXPERTS: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The product of a tile. A thread has few of its rows, so that their scales take few registers."""
    expert, first, rows = rows_of_tile(ends, experts, tl.program_id(1), EXPERTS, M)
    if expert < experts:
        m = first + tl.arange(0, M)
        n = tl.program_id(0) * N
        blocks = tl.cdiv(depth, _SIDE)
        a_scale = a_scales + tl.where(m < rows, m, rows - 1).to(tl.int64) * a_scales_row
        b_scale = b_scales + (expert * (outputs // _SIDE) + n // _SIDE) * blocks
        scale_m, scale_n = tl.load(a_scale), tl.load(b_scale)
        total = tl.zeros([M, N], tl.float32)
        for block in range(blocks):
            ahead = tl.minimum(block + 1, blocks - 1)
            next_m, next_n = tl.load(a_scale + ahead * a_scales_step), tl.load(b_scale + ahead)
            # Rows beyond the expert's are of others, and not stored.
            row, weight = a.load([first, block * _SIDE]), b.load([expert * outputs + n, block * _SIDE])
            part = tl.dot(row, weight.T)
            total += part * (scale_m * scale_n)[:, None]
            scale_m, scale_n = next_m, next_n
        o = n + tl.arange(0, N)
        place = out + m.to(tl.int64)[:, None] * outputs + o[None, :]
        tl.store(place, total, (m < rows)[:, None] & (o < outputs)[None, :])


def fp8_grouped_matmul(
    a_NK: Tensor, a_scales: Tensor, b_EOK: Tensor, b_scales: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    a_NK, b_EOK, b_scales = a_NK.contiguous(), b_EOK.contiguous(), b_scales.contiguous()
    out = torch.empty((len(a_NK), b_EOK.shape[1]), dtype=dtype, device=a_NK.device)
    if len(a_NK) > _MANY_ROWS * len(b_EOK) and a_NK.shape[1] % _ALIGNED == 0:
        # The fastest of `benchmarks/gpu_parts/fp8_tiles.py` on an H200.
        many_rows_matmul(a_NK, a_scales, b_EOK, b_scales, ends_E, out, tile_n=128, tile_m=64, warps=4, stages=3)
    elif len(a_NK):
        _few_rows_matmul(a_NK, a_scales, b_EOK, b_scales, ends_E, out)
    return out


def many_rows_matmul(
    a_NK: Tensor, a_scales: Tensor, b_EOK: Tensor, b_scales: Tensor, ends_E: Tensor, out: Tensor,
    *, tile_n: int, tile_m: int, warps: int, stages: int,
) -> None:  # fmt: skip
    """Fill `out`, in tiles of `tile_n` outputs by `tile_m` rows, which divide or are 128."""
    experts, outputs, depth = b_EOK.shape
    a = TensorDescriptor.from_tensor(a_NK, [tile_m, BLOCK])
    b = TensorDescriptor.from_tensor(b_EOK.view(-1, depth), [tile_n, BLOCK])
    _many_rows_kernel[_grid(out, experts, tile_n, tile_m)](
        a, a_scales, b, b_scales, ends_E, out, outputs, depth, *a_scales.stride(), experts,
        EXPERTS=triton.next_power_of_2(experts), N=tile_n, M=tile_m, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _few_rows_matmul(
    a_NK: Tensor, a_scales: Tensor, b_EOK: Tensor, b_scales: Tensor, ends_E: Tensor, out: Tensor
) -> None:
    experts, outputs, depth = b_EOK.shape
    mean = len(a_NK) / experts
    tile_m = 16 if mean <= 16 else 32 if mean <= 32 else 64
    tile_n = 64 if tile_m < 64 else 128
    _few_rows_kernel[_grid(out, experts, tile_n, tile_m)](
        a_NK, a_scales, b_EOK, b_scales, ends_E, out, outputs, depth, *a_scales.stride(), experts,
        EXPERTS=triton.next_power_of_2(experts), EVEN=depth % BLOCK == 0, N=tile_n, M=tile_m, num_warps=4, num_stages=4,
    )  # fmt: skip


def _grid(out: Tensor, experts: int, tile_n: int, tile_m: int) -> tuple[int, int]:
    """Tiles of outputs, and of rows as many as there can be: each expert's last one may not be full."""
    rows, outputs = out.shape
    return triton.cdiv(outputs, tile_n), triton.cdiv(rows, tile_m) + experts
