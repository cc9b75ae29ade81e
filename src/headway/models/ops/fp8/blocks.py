"""Matrix products in FP8 (e4m3) with one float32 scale per block: 1x128 for activations and gradients, 128x128 for
weights, as DeepSeek-V3 was trained (https://arxiv.org/abs/2412.19437).

A block's scale is its largest magnitude / 448, so that the largest number becomes e4m3's largest. Products add up in
float32. Blocks at the edges of a matrix may be smaller.

Scales of 1x128 blocks lie column by column, which is the order that matrix products read them in.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.ops.registry import Op, in_triton, in_triton_serving

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""
SMALLEST = 1e-12
"""Blocks of zeros get the scale of a block with this largest magnitude."""
BLOCK = 128
ROWS = 16
"""cuBLAS multiplies whole multiples of this many rows."""
DEPTH = 4 * BLOCK
"""And sums over whole multiples of this many numbers, unless memory follows rows of scales: they are of whole 16
bytes."""


class Fp8Blocks(NamedTuple):
    """A matrix (rows, columns) in FP8 and its scales: (rows, columns / 128) for 1x128 blocks, (rows / 128, columns /
    128) for 128x128, rounded up. Stacked matrices have one more dimension in front."""

    values: Tensor
    scales: Tensor


def blocks_of(size: int) -> int:
    return -(-size // BLOCK)


@Op
def quantize_1x128(x_TI: Tensor) -> Fp8Blocks:
    """Quantize rows. Their scales (T, I / 128) lie column by column."""
    rows, width = x_TI.shape
    padded = F.pad(x_TI.float(), (0, -width % BLOCK)).view(rows, -1, BLOCK)
    values, scales = _quantized(padded, (2,))
    return Fp8Blocks(values.flatten(1)[:, :width].contiguous(), scales.t().contiguous().t())


def quantized_rows(x_TI: Tensor) -> Fp8Blocks:
    """`quantize_1x128`, unless the kernel that made the rows has quantized them, too."""
    return getattr(x_TI, "fp8_blocks", None) or quantize_1x128(x_TI)


def keep_blocks(x_TI: Tensor, blocks: Fp8Blocks) -> Tensor:
    """Return the same rows, of which `quantized_rows` knows the blocks."""
    x_TI.fp8_blocks = blocks  # type: ignore[attr-defined]  # of no other tensor, and gone with this one
    return x_TI


@Op
def quantize_columns(x_TI: Tensor) -> Fp8Blocks:
    """`quantize_1x128` of the transposed matrix (I, T), with columns of zeros up to a multiple of 512: the operands of
    a weight's gradient, which is a sum over tokens."""
    return quantize_1x128.reference(F.pad(x_TI.t(), (0, -len(x_TI) % DEPTH)))


@Op
def quantize_128x128(
    weight_OI: Tensor, dtype: torch.dtype, transposed: bool = False, out: Fp8Blocks | None = None
) -> Fp8Blocks:
    """Quantize a weight as it is in `dtype`, the precision in which it is sent to engines; `transposed`: (I, O). The
    result goes to `out`, where that is given."""
    matrix = weight_OI.to(dtype).float()
    matrix = matrix.t() if transposed else matrix
    rows, width = matrix.shape
    padded = F.pad(matrix, (0, -width % BLOCK, 0, -rows % BLOCK))
    values, scales = _quantized(padded.view(blocks_of(rows), BLOCK, -1, BLOCK), (1, 3))
    values = values.view(padded.shape)[:rows, :width]
    if out is None:
        return Fp8Blocks(values.contiguous(), scales)
    out.values.view(torch.uint8).copy_(values.view(torch.uint8))
    out.scales.copy_(scales)
    return out


@Op
def transpose_fp8(values: Tensor) -> Tensor:
    """Transpose the last two dimensions, in memory."""
    # As bytes: torch has few operations on FP8.
    return values.view(torch.uint8).transpose(-2, -1).contiguous().view(FP8)


def transpose_blocks(table: Fp8Blocks) -> Fp8Blocks:
    """Transpose one or several matrices in 128x128 blocks."""
    return Fp8Blocks(transpose_fp8(table.values), table.scales.transpose(-2, -1).contiguous())


@Op
def fp8_matmul(
    a_MK: Tensor, a_scales: Tensor, b_NK: Tensor, b_scales: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """a @ b.T of two matrices in FP8, (M, N) in `dtype`; a is in blocks of 1x128, b of 1x128 or 128x128."""
    return (dequantize(a_MK, a_scales) @ dequantize(b_NK, b_scales).t()).to(dtype)


@Op
def fp8_matmul_parts(a_MK: Tensor, a_scales: Tensor, b_NK: Tensor, b_scales: Tensor) -> Tensor:
    """`fp8_matmul` before its last sum: parts (S, M, N) in float32, of any number."""
    return fp8_matmul(a_MK, a_scales, b_NK, b_scales).unsqueeze(0)


def quantize_vectors(x: Tensor) -> Fp8Blocks:
    """Quantize the last dimension, whatever its size: one scale for all of it."""
    return Fp8Blocks(*_quantized(x.float(), (-1,)))


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """The matrix, in float32."""
    rows, width = values.shape
    if len(scales) != rows:
        scales = scales.repeat_interleave(BLOCK, 0)[:rows]
    return values.float() * scales.repeat_interleave(BLOCK, 1)[:, :width]


def _quantized(blocks: Tensor, within: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Values, and scales without the dimensions `within` blocks."""
    largest = blocks.abs().amax(within, keepdim=True).clamp_min(SMALLEST)
    # By a tensor: a GPU multiplies by the inverse of a number, which rounds differently.
    scales = largest / largest.new_full((), LARGEST)
    return (blocks * (1 / scales)).to(FP8), scales.squeeze(within)


_TRITON = "headway.models.ops.triton.fp8:"
quantize_1x128.backend("triton", takes=in_triton)(f"{_TRITON}quantize_1x128")
quantize_columns.backend("triton", takes=in_triton)(f"{_TRITON}quantize_columns")
quantize_128x128.backend("triton", takes=in_triton)(f"{_TRITON}quantize_128x128")
transpose_fp8.backend("triton", takes=in_triton)(f"{_TRITON}transpose_fp8")

_MANY_ROWS = 64
"""Beyond, cuBLAS is faster than the Triton kernel, which reads weights at the speed of memory."""


def _in_cublas(
    a_MK: Tensor, a_scales: Tensor, b_NK: Tensor, b_scales: Tensor, dtype: torch.dtype = torch.float32
) -> bool:
    """Shapes whose scales lie as cuBLAS wants them. The quantized rows have memory up to a multiple of 16."""
    rows, depth = a_MK.shape
    fits = depth % DEPTH == 0 or _has_rest(b_NK, b_scales)
    fits = fits and len(b_NK) % ROWS == 0 and rows > _MANY_ROWS
    return fits and _padded_rows(a_MK, a_scales) is not None and torch.cuda.get_device_capability(a_MK.device)[0] >= 9


def empty_scales(rows: int, depth: int, device: torch.device) -> Tensor:
    """Scales for the 128x128 blocks of a matrix, unset, each row of them in memory of whole 16 bytes."""
    blocks = blocks_of(depth)
    return torch.empty((blocks_of(rows), -(-blocks // 4) * 4), device=device)[:, :blocks]


def _has_rest(b_NK: Tensor, b_scales: Tensor) -> bool:
    """Tell if these are whole 128x128 blocks with scales that `empty_scales` made."""
    whole = all(size % BLOCK == 0 for size in b_NK.shape) and len(b_scales) == len(b_NK) // BLOCK
    return whole and b_scales.stride() == (-(-b_scales.shape[1] // 4) * 4, 1)


def _padded_rows(a_MK: Tensor, a_scales: Tensor) -> int | None:
    """Rows that the memory of quantized rows has, if cuBLAS takes that many."""
    rows = a_scales.stride(1)
    inside = a_MK.untyped_storage().nbytes() - a_MK.storage_offset() >= rows * a_MK.shape[1]
    return rows if a_scales.stride(0) == 1 and rows % ROWS == 0 and inside and a_MK.is_contiguous() else None


@fp8_matmul.backend("cuda", takes=_in_cublas)
def _fp8_matmul_cublas(
    a_MK: Tensor, a_scales: Tensor, b_NK: Tensor, b_scales: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    rows = _padded_rows(a_MK, a_scales)
    assert rows is not None
    whole = a_MK.as_strided((rows, a_MK.shape[1]), a_MK.stride())
    scales = a_scales.as_strided((rows, a_scales.shape[1]), a_scales.stride())
    if a_MK.shape[1] % DEPTH == 0:
        return torch._scaled_mm(whole, b_NK.t(), scales, b_scales.t(), out_dtype=dtype)[: len(a_MK)]
    # This one takes rows of scales with a rest behind them.
    stride = b_scales.stride(0)
    rests = b_scales.as_strided((len(b_scales), stride), (stride, 1))
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    return F.scaled_mm(whole, b_NK.t(), scales, kinds[0], rests.t(), kinds[1], output_dtype=dtype)[: len(a_MK)]


def splits_sums(x_TI: Tensor) -> bool:
    """Tell if products of these rows are made in parts, which whoever takes them may sum."""
    return len(x_TI) <= _MANY_ROWS and in_triton_serving(x_TI)


fp8_matmul.backend("triton", takes=in_triton)(f"{_TRITON}fp8_matmul")
fp8_matmul_parts.backend("triton", takes=lambda a_MK, *_: splits_sums(a_MK))(f"{_TRITON}fp8_matmul_parts")
