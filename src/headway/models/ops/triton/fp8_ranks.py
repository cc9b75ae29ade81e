"""Quantized rows and weights with the ranks of adapters beside them, each in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.fp8.blocks import BLOCK, FP8, Fp8Blocks, blocks_of, empty_scales
from headway.models.ops.fp8.ranks import rank_columns
from headway.models.ops.triton.fp8 import empty_rows, inverse, scale_of

_SIDE: tl.constexpr = tl.constexpr(BLOCK)
_LEAST_POWER: tl.constexpr = tl.constexpr(127 - 6)
"""Of e4m3's smallest normal number, as float32 holds it."""
_TOKENS = 32


@triton.jit
def _halves(scaled):  # type: ignore[no-untyped-def]
    # Rounded by adding a number whose last bit is worth as much as e4m3's: ptxas unpacks pairs of e4m3 wrongly here.
    power = (scaled.to(tl.int32, bitcast=True) >> 23) & 255
    shift = 1.5 * ((tl.maximum(power, _LEAST_POWER) + 20) << 23).to(tl.float32, bitcast=True)
    high = (scaled + shift) - shift
    return high.to(tl.float8e4nv), (scaled - high).to(tl.float8e4nv)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _store_parts(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    place, first, second, third, inside, ranks, columns, RANKS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Three columns for each rank from `place` on, one pointer for each row, and zeros behind them."""
    column = tl.arange(0, COLUMNS)[None, :]
    nothing = tl.zeros([1, COLUMNS], tl.float32).to(tl.float8e4nv)
    tl.store(place[:, None] + column, nothing, inside[:, None] & (column >= 3 * ranks) & (column < columns))
    r = tl.arange(0, RANKS)[None, :]
    real = inside[:, None] & (r < ranks)
    tl.store(place[:, None] + r, first, real)
    tl.store(place[:, None] + ranks + r, second, real)
    tl.store(place[:, None] + 2 * ranks + r, third, real)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _rows_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x, given, values, scales, rows, width, columns, x_stride, given_stride, scales_stride, ranks,
    TOKENS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    block = tl.program_id(1).to(tl.int64)
    inside = t < rows
    at = t.to(tl.int64)
    place = values + at * (width + columns) + block * _SIDE
    if block < width // _SIDE:
        i = tl.arange(0, _SIDE)[None, :]
        number = tl.load(x + at[:, None] * x_stride + block * _SIDE + i, inside[:, None], other=0.0).to(tl.float32)
        scale = scale_of(tl.max(tl.abs(number), 1))
        tl.store(place[:, None] + i, (number * inverse(scale)[:, None]).to(tl.float8e4nv), inside[:, None])
        tl.store(scales + block * scales_stride + t, scale, inside)
    else:
        r = tl.arange(0, RANKS)[None, :]
        rank = tl.load(given + at[:, None] * given_stride + r, inside[:, None] & (r < ranks), other=0.0).to(tl.float32)
        rank_scale = scale_of(tl.max(tl.abs(rank), 1))
        high, low = _halves(rank * inverse(rank_scale)[:, None])
        _store_parts(place, high, low, high, inside, ranks, columns, RANKS, COLUMNS)
        for more in range(columns // _SIDE):
            tl.store(scales + (block + more) * scales_stride + t, rank_scale, inside)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _weights_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    table, table_scales, ups, values, scales, rows, width, columns, row_stride, column_stride, scale_row, scale_column,
    ups_stride, scales_stride, ranks, RANKS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    row_block, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o = row_block * _SIDE + tl.arange(0, _SIDE)
    place = values + o * (width + columns) + block * _SIDE
    scale_place = scales + row_block * scales_stride + block
    if block < width // _SIDE:
        i = tl.arange(0, _SIDE)
        if TRANSPOSED:
            # Read along the memory, and turned.
            at = (block * _SIDE + i)[:, None] * column_stride + o[None, :]
            number = tl.trans(tl.load(table + at))
        else:
            number = tl.load(table + o[:, None] * row_stride + block * _SIDE + i[None, :])
        tl.store(place[:, None] + i[None, :], number)
        tl.store(scale_place, tl.load(table_scales + row_block * scale_row + block * scale_column))
    else:
        r = tl.arange(0, RANKS)
        up = tl.load(ups + r[:, None] * ups_stride + o[None, :], (r < ranks)[:, None], other=0.0).to(tl.float32)
        up = tl.trans(up)
        scale = scale_of(tl.max(tl.max(tl.abs(up), 1, keep_dims=True), 0, keep_dims=True))
        high, low = _halves(up * inverse(scale))
        inside = o < rows
        _store_parts(place, high, high, low, inside, ranks, columns, RANKS, COLUMNS)
        for more in range(columns // _SIDE):
            tl.store(scale_place + more + tl.zeros([1, 1], tl.int32), scale)


def rows_with_ranks(x_TI: Tensor, ranks_TR: Tensor) -> Fp8Blocks:
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    ranks_TR = ranks_TR if ranks_TR.stride(1) == 1 else ranks_TR.contiguous()
    (rows, width), ranks = x_TI.shape, ranks_TR.shape[1]
    columns = rank_columns(ranks)
    blocks = empty_rows(rows, width + columns, x_TI.device)
    if rows:
        _rows_kernel[(triton.cdiv(rows, _TOKENS), blocks_of(width) + 1)](
            x_TI, ranks_TR, *blocks, rows, width, columns, x_TI.stride(0), ranks_TR.stride(0),
            blocks.scales.stride(1), ranks, TOKENS=_TOKENS, **_compiled(ranks, columns),
        )  # fmt: skip
    return blocks


def weights_with_ranks(ups_RO: Tensor, table: Fp8Blocks, transposed: bool = False) -> Fp8Blocks:
    ups_RO = ups_RO if ups_RO.stride(1) == 1 else ups_RO.contiguous()
    given, given_scales = table.values, table.scales
    rows, width = given.shape[::-1] if transposed else given.shape
    ranks, device = len(ups_RO), given.device
    columns = rank_columns(ranks)
    values = torch.empty((rows, width + columns), dtype=FP8, device=device)
    scales = empty_scales(rows, width + columns, device)
    strides, scale_strides = (part.stride()[:: -1 if transposed else 1] for part in (given, given_scales))
    _weights_kernel[(blocks_of(rows), blocks_of(width) + 1)](
        given, given_scales, ups_RO, values, scales, rows, width, columns, *strides, *scale_strides, ups_RO.stride(0),
        scales.stride(0), ranks, TRANSPOSED=transposed, num_warps=8, **_compiled(ranks, columns),
    )  # fmt: skip
    return Fp8Blocks(values, scales)


def _compiled(ranks: int, columns: int) -> dict[str, int]:
    return {"RANKS": max(16, triton.next_power_of_2(ranks)), "COLUMNS": triton.next_power_of_2(columns)}
