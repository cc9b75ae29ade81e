"""Quantization to FP8 with block scales in one pass over the numbers, and products of what was quantized: those of few
rows, which are bound by reading weights, and those of shapes that cuBLAS does not take."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.fp8.blocks import BLOCK, DEPTH, FP8, LARGEST, ROWS, SMALLEST, Fp8Blocks, blocks_of

_SIDE: tl.constexpr = tl.constexpr(BLOCK)
_LARGEST: tl.constexpr = tl.constexpr(LARGEST)
_SMALLEST: tl.constexpr = tl.constexpr(SMALLEST)
_TOKENS, _COLUMNS = 32, 64
"""Tiles of `quantize_1x128` (by 128) and of `quantize_columns` (128 by)."""
_PROGRAMS = 396
"""Programs that run at a time: three on each of an H200's 132 multiprocessors."""
_LEAST_BLOCKS = 8
"""Of a part of a sum: more parts cost more to add up than they gain."""


@triton.jit
def scale_of(largest):  # type: ignore[no-untyped-def]
    # With IEEE rounding, as the reference has it.
    return tl.div_rn(tl.maximum(largest, _SMALLEST), tl.full(largest.shape, _LARGEST, tl.float32))


@triton.jit
def inverse(scale):  # type: ignore[no-untyped-def]
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def store_row_blocks(number, values, scales, row, first, size, scales_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantize BLOCK numbers of a row, from number `first` on, a whole number of blocks, as `quantize_1x128` does."""
    block = tl.arange(0, BLOCK // _SIDE)
    number = tl.reshape(number.to(tl.float32), (BLOCK // _SIDE, _SIDE))
    scale = scale_of(tl.max(tl.abs(number), 1))
    quantized = (number * inverse(scale)[:, None]).to(tl.float8e4nv)
    column = first + block[:, None] * _SIDE + tl.arange(0, _SIDE)[None, :]
    tl.store(values + row * size + column, quantized, column < size)
    block += first // _SIDE
    tl.store(scales + block.to(tl.int64) * scales_stride + row, scale, block * _SIDE < size)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _rows_kernel(x, values, scales, rows, width, x_stride, scales_stride, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    block = tl.program_id(1)
    i = block * _SIDE + tl.arange(0, _SIDE)
    inside = (t < rows)[:, None] & (i < width)[None, :]
    at = t.to(tl.int64)[:, None]
    number = tl.load(x + at * x_stride + i[None, :], inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(number), 1))
    quantized = (number * inverse(scale)[:, None]).to(tl.float8e4nv)
    tl.store(values + at * width + i[None, :], quantized, inside)
    tl.store(scales + block.to(tl.int64) * scales_stride + t, scale, t < rows)


@triton.jit
def store_columns(number, values, scales, block, i, width, padded):  # type: ignore[no-untyped-def]
    """Quantize the numbers of a block of 128 rows, columns `i` of `width`, and store them transposed, in rows of
    `padded` numbers."""
    scale = scale_of(tl.max(tl.abs(number), 0))
    quantized = (number * inverse(scale)[None, :]).to(tl.float8e4nv)
    t = block.to(tl.int64) * _SIDE + tl.arange(0, _SIDE)
    place = values + i.to(tl.int64)[:, None] * padded + t[None, :]
    tl.store(place, tl.trans(quantized), (i < width)[:, None])
    tl.store(scales + block.to(tl.int64) * width + i, scale, i < width)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _columns_kernel(x, values, scales, rows, width, x_stride, padded, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    t = (block * _SIDE + tl.arange(0, _SIDE)).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (t < rows)[:, None] & (i < width)[None, :]
    number = tl.load(x + t[:, None] * x_stride + i[None, :], inside, other=0.0).to(tl.float32)
    # Tokens beyond the last are zeros: what a product sums over is of whole blocks.
    store_columns(number, values, scales, block, i, width, padded)


@triton.jit
def _weight_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    weight, values, scales, rounding, rows, width, weight_stride, row_stride, column_stride, scale_stride,
    scale_step,
):  # fmt: skip
    row_block, column_block = tl.program_id(0), tl.program_id(1)
    o = (row_block * _SIDE + tl.arange(0, _SIDE)).to(tl.int64)
    i = (column_block * _SIDE + tl.arange(0, _SIDE)).to(tl.int64)
    inside = (o < rows)[:, None] & (i < width)[None, :]
    number = tl.load(weight + o[:, None] * weight_stride + i[None, :], inside, other=0.0)
    number = number.to(rounding.dtype.element_ty).to(tl.float32)
    scale = scale_of(tl.max(tl.max(tl.abs(number), 1, keep_dims=True), 0, keep_dims=True))
    quantized = (number * inverse(scale)).to(tl.float8e4nv)
    tl.store(values + o[:, None] * row_stride + i[None, :] * column_stride, quantized, inside)
    place = scales + row_block.to(tl.int64) * scale_stride + column_block * scale_step
    tl.store(place + tl.zeros([1, 1], tl.int32), scale)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _transpose_kernel(x, out, rows, width, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    matrix = tl.program_id(2).to(tl.int64) * rows * width
    r = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    c = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (r < rows)[:, None] & (c < width)[None, :]
    byte = tl.load(x + matrix + r[:, None] * width + c[None, :], inside, other=0)
    flipped = (c < width)[:, None] & (r < rows)[None, :]
    tl.store(out + matrix + c[:, None] * rows + r[None, :], tl.trans(byte), flipped)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _matmul_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    a, a_scales, b, b_scales, out, rows, outputs, depth, a_scales_row, a_scales_step, b_scales_row, b_scales_step,
    blocks, GROUP: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The transposed product of a tile: the weight's rows are the long side of the hardware's instruction."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    m = tl.program_id(1) * M + tl.arange(0, M)
    first = tl.program_id(2) * blocks
    k = tl.arange(0, _SIDE)
    # Beyond the edges something else is read, and nothing is stored.
    b_nk = b + (n % outputs).to(tl.int64)[:, None] * depth + k[None, :]
    a_km = a + (m % rows).to(tl.int64)[None, :] * depth + k[:, None]
    a_scale = a_scales + (m % rows).to(tl.int64) * a_scales_row
    if GROUP == 1:
        b_scale = b_scales + (n % outputs).to(tl.int64) * b_scales_row
    else:
        b_scale = b_scales + tl.program_id(0) * N // GROUP * b_scales_row
    end = tl.minimum(first + blocks, tl.cdiv(depth, _SIDE))
    # Scales are read a block ahead: the compiler does so for the operands of products alone.
    begin = tl.minimum(first, end - 1)
    scale_m = tl.load(a_scale + begin * a_scales_step)
    scale_n = tl.load(b_scale + begin * b_scales_step)
    total = tl.zeros([N, M], tl.float32)
    for block in range(first, end):
        at = block * _SIDE
        ahead = tl.minimum(block + 1, end - 1)
        next_m = tl.load(a_scale + ahead * a_scales_step)
        next_n = tl.load(b_scale + ahead * b_scales_step)
        if EVEN:
            weight, row = tl.load(b_nk + at), tl.load(a_km + at)
        else:
            weight = tl.load(b_nk + at, (k < depth - at)[None, :], other=0.0)
            row = tl.load(a_km + at, (k < depth - at)[:, None], other=0.0)
        part = tl.dot(weight, row)
        if GROUP == 1:
            total += part * (scale_n[:, None] * scale_m[None, :])
        else:
            total += part * (scale_m * scale_n)[None, :]
        scale_m, scale_n = next_m, next_n
    place = out + (tl.program_id(2).to(tl.int64) * rows + m[None, :]) * outputs + n[:, None]
    tl.store(place, total, (m < rows)[None, :] & (n < outputs)[:, None])


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _sum_kernel(parts, out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts + split * size + at, at < size, other=0.0)
    tl.store(out + at, total, at < size)


def quantize_1x128(x_TI: Tensor) -> Fp8Blocks:
    """The memory has rows up to a multiple of 16, unset, for products of whole tiles."""
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    rows, width = x_TI.shape
    blocks = empty_rows(rows, width, x_TI.device)
    if rows:
        grid = (triton.cdiv(rows, _TOKENS), blocks_of(width))
        _rows_kernel[grid](x_TI, *blocks, rows, width, x_TI.stride(0), blocks.scales.stride(1), TOKENS=_TOKENS)
    return blocks


def empty_rows(rows: int, width: int, device: torch.device) -> Fp8Blocks:
    """Quantized rows for a kernel to fill, in memory of rows up to a multiple of 16."""
    padded = triton.cdiv(rows, ROWS) * ROWS
    values = torch.empty((padded, width), dtype=FP8, device=device)[:rows]
    scales = torch.empty((blocks_of(width), padded), dtype=torch.float32, device=device)
    return Fp8Blocks(values, scales[:, :rows].t())


def quantize_columns(x_TI: Tensor) -> Fp8Blocks:
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    rows, width = x_TI.shape
    padded = triton.cdiv(rows, DEPTH) * DEPTH
    values = torch.empty((width, padded), dtype=FP8, device=x_TI.device)
    scales = torch.empty((padded // BLOCK, width), dtype=torch.float32, device=x_TI.device)
    if rows:
        grid = (padded // BLOCK, triton.cdiv(width, _COLUMNS))
        _columns_kernel[grid](x_TI, values, scales, rows, width, x_TI.stride(0), padded, COLUMNS=_COLUMNS)
    return Fp8Blocks(values, scales.t())


def quantize_128x128(
    weight_OI: Tensor, dtype: torch.dtype, transposed: bool = False, out: Fp8Blocks | None = None
) -> Fp8Blocks:
    weight_OI = weight_OI if weight_OI.stride(1) == 1 else weight_OI.contiguous()
    rows, width = weight_OI.shape
    if out is None:
        shape = (width, rows) if transposed else (rows, width)
        values = torch.empty(shape, dtype=FP8, device=weight_OI.device)
        scales = torch.empty([blocks_of(size) for size in shape], dtype=torch.float32, device=weight_OI.device)
        out = Fp8Blocks(values, scales)
    strides = [stride for part in out for stride in (part.stride()[::-1] if transposed else part.stride())]
    # The kernel learns a precision from a pointer.
    rounding = torch.empty(0, dtype=dtype, device=weight_OI.device)
    _weight_kernel[(blocks_of(rows), blocks_of(width))](
        weight_OI, *out, rounding, rows, width, weight_OI.stride(0), *strides, num_warps=8
    )
    return out


def transpose_fp8(values: Tensor) -> Tensor:
    values = values.contiguous()
    *stacked, rows, width = values.shape
    out = torch.empty((*stacked, width, rows), dtype=FP8, device=values.device)
    count = values.numel() // max(1, rows * width)
    grid = triton.cdiv(rows, BLOCK), triton.cdiv(width, BLOCK), count
    _transpose_kernel[grid](values.view(torch.uint8), out.view(torch.uint8), rows, width, TILE=BLOCK)
    return out


def fp8_matmul(
    a_MK: Tensor, a_scales: Tensor, b_NK: Tensor, b_scales: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    a_MK, b_NK = a_MK.contiguous(), b_NK.contiguous()
    if not len(a_MK):
        return torch.empty((0, len(b_NK)), dtype=dtype, device=a_MK.device)
    return tiled_matmul(a_MK, a_scales, b_NK, b_scales, dtype, **_tiling(a_MK, b_NK))


def fp8_matmul_parts(a_MK: Tensor, a_scales: Tensor, b_NK: Tensor, b_scales: Tensor) -> Tensor:
    a_MK, b_NK = a_MK.contiguous(), b_NK.contiguous()
    if not len(a_MK):
        return torch.empty((1, 0, len(b_NK)), dtype=torch.float32, device=a_MK.device)
    return _tiled_parts(a_MK, a_scales, b_NK, b_scales, torch.float32, **_tiling(a_MK, b_NK))


def _tiling(a_MK: Tensor, b_NK: Tensor) -> dict[str, int]:
    """The sizes of tiles, the parts of a sum, warps and stages."""
    (rows, depth), outputs = a_MK.shape, len(b_NK)
    # The fastest of `benchmarks/gpu_parts/fp8_tiles.py` on an H200.
    tile_m = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    tile_n = 64 if rows <= 128 else 128
    tiles = triton.cdiv(outputs, tile_n) * triton.cdiv(rows, tile_m)
    splits = _splits(tiles, blocks_of(depth), _PROGRAMS if rows <= 64 else _PROGRAMS * 2 // 3)
    launch = {"warps": 4, "stages": 4} if tile_n == 64 else {"warps": 8, "stages": 3}
    return {"tile_n": tile_n, "tile_m": tile_m, "splits": splits} | launch


def tiled_matmul(
    a_MK: Tensor, a_scales: Tensor, b_NK: Tensor, b_scales: Tensor, dtype: torch.dtype,
    tile_n: int, tile_m: int, splits: int, *, warps: int, stages: int,
) -> Tensor:  # fmt: skip
    """Compute the product in tiles of `tile_n` outputs by `tile_m` rows, the sum in `splits` parts. None of these
    changes the result except by the order of sums."""
    parts = _tiled_parts(
        a_MK, a_scales, b_NK, b_scales, dtype, tile_n, tile_m, splits, warps=warps, stages=stages
    )  # fmt: skip
    if splits == 1:
        return parts[0]
    out = torch.empty(parts.shape[1:], dtype=dtype, device=a_MK.device)
    _sum_kernel[(triton.cdiv(out.numel(), 1024),)](parts, out, out.numel(), SPLITS=splits, BLOCK=1024)
    return out


def _tiled_parts(
    a_MK: Tensor, a_scales: Tensor, b_NK: Tensor, b_scales: Tensor, dtype: torch.dtype,
    tile_n: int, tile_m: int, splits: int, *, warps: int, stages: int,
) -> Tensor:  # fmt: skip
    """The parts (splits, M, N) of the product, in float32, or in `dtype` where there is one alone."""
    (rows, depth), outputs = a_MK.shape, len(b_NK)
    tiles = triton.cdiv(outputs, tile_n), triton.cdiv(rows, tile_m)
    dtype = dtype if splits == 1 else torch.float32
    parts = torch.empty((splits, rows, outputs), dtype=dtype, device=a_MK.device)
    _matmul_kernel[(*tiles, splits)](
        a_MK, a_scales, b_NK, b_scales, parts, rows, outputs, depth, *a_scales.stride(), *b_scales.stride(),
        triton.cdiv(blocks_of(depth), splits), GROUP=1 if len(b_scales) == outputs else BLOCK,
        EVEN=depth % BLOCK == 0, N=tile_n, M=tile_m, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return parts


def _splits(tiles: int, blocks: int, programs: int) -> int:
    """Parts of the sum, where a product has too few tiles to keep the memory busy; each is of several blocks."""
    return max(1, min(programs // tiles, blocks // _LEAST_BLOCKS))
