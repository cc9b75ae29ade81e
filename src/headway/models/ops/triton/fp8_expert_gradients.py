"""Gradients of experts' weights in FP8: rows are gathered, quantized and transposed at once, and each tile of a
gradient is a sum over the blocks of its expert."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headway.models.ops.experts.fp8_gradients import most_blocks
from headway.models.ops.fp8.blocks import BLOCK, FP8, Fp8Blocks
from headway.models.ops.triton.fp8 import store_columns
from headway.models.ops.triton.fp8_experts import rows_of_tile, tiles_of_experts

_SIDE: tl.constexpr = tl.constexpr(BLOCK)
_COLUMNS = 64
"""Of a tile of `quantize_groups`, 128 by that many."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _groups_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x, tokens, ends, values, scales, width, x_stride, padded, experts, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr
):
    block = tl.program_id(0)
    # Behind the last expert's blocks there are no rows, and zeros are stored.
    _, first, end = rows_of_tile(ends, experts, block, EXPERTS, _SIDE)
    n = first + tl.arange(0, _SIDE)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = n if tokens is None else tl.load(tokens + n, n < end, other=0)
    inside = (n < end)[:, None] & (i < width)[None, :]
    number = tl.load(x + row.to(tl.int64)[:, None] * x_stride + i[None, :], inside, other=0.0).to(tl.float32)
    store_columns(number, values, scales, block, i, width, padded)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _gradient_kernel(  # type: ignore[no-untyped-def]  # arguments are descriptors and pointers to the compiler
    a, a_scales, b, b_scales, ends, out, outputs, inputs, a_scales_row, a_scales_step, b_scales_row, b_scales_step,
    last, experts, EXPERTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A tile of M outputs by N inputs, of one expert."""
    expert = tl.program_id(2)
    e, _, _, blocks = tiles_of_experts(ends, experts, EXPERTS, _SIDE)
    first = tl.sum(tl.where(e < expert, blocks, 0), 0)
    end = first + tl.sum(tl.where(e == expert, blocks, 0), 0)
    top, left = tl.program_id(1) * M, tl.program_id(0) * N
    m, n = top + tl.arange(0, M), left + tl.arange(0, N)
    # Beyond the edges something else is read, and nothing is stored.
    a_scale = a_scales + (m % outputs).to(tl.int64) * a_scales_row
    b_scale = b_scales + (n % inputs).to(tl.int64) * b_scales_row
    # Scales are read a block ahead, as in `fp8_matmul`; an expert without rows may stand behind the last block.
    begin = tl.minimum(first, last)
    scale_m, scale_n = tl.load(a_scale + begin * a_scales_step), tl.load(b_scale + begin * b_scales_step)
    total = tl.zeros([M, N], tl.float32)
    for block in range(first, end):
        ahead = tl.minimum(block + 1, end - 1)
        next_m, next_n = tl.load(a_scale + ahead * a_scales_step), tl.load(b_scale + ahead * b_scales_step)
        part = tl.dot(a.load([top, block * _SIDE]), b.load([left, block * _SIDE]).T)
        total += part * (scale_m[:, None] * scale_n[None, :])
        scale_m, scale_n = next_m, next_n
    place = out + (expert.to(tl.int64) * outputs + m)[:, None] * inputs + n[None, :]
    tl.store(place, total, (m < outputs)[:, None] & (n < inputs)[None, :])


def quantize_groups(x_TI: Tensor, ends_E: Tensor, tokens_N: Tensor | None = None) -> Fp8Blocks:
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    width, experts = x_TI.shape[1], len(ends_E)
    blocks = most_blocks(len(x_TI if tokens_N is None else tokens_N), experts)
    values = torch.empty((width, blocks * BLOCK), dtype=FP8, device=x_TI.device)
    scales = torch.empty((blocks, width), dtype=torch.float32, device=x_TI.device)
    if blocks:
        _groups_kernel[(blocks, triton.cdiv(width, _COLUMNS))](
            x_TI, tokens_N, ends_E, values, scales, width, x_TI.stride(0), blocks * BLOCK, experts,
            EXPERTS=triton.next_power_of_2(experts), COLUMNS=_COLUMNS,
        )  # fmt: skip
    return Fp8Blocks(values, scales.t())


def fp8_grouped_weight_gradient(
    grad_OP: Tensor, grad_scales: Tensor, rows_IP: Tensor, rows_scales: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    out = torch.empty((len(ends_E), len(grad_OP), len(rows_IP)), dtype=dtype, device=grad_OP.device)
    if not grad_OP.shape[1]:
        return out.zero_()
    # Without spills, and three programs fit on a multiprocessor. Others are in `benchmarks/gpu_parts/fp8_tiles.py`.
    weight_gradient(grad_OP, grad_scales, rows_IP, rows_scales, ends_E, out, tile_m=64, tile_n=128, warps=4, stages=3)
    return out


def weight_gradient(
    grad_OP: Tensor, grad_scales: Tensor, rows_IP: Tensor, rows_scales: Tensor, ends_E: Tensor, out: Tensor,
    *, tile_m: int, tile_n: int, warps: int, stages: int,
) -> None:  # fmt: skip
    """Fill `out`, in tiles of `tile_m` outputs by `tile_n` inputs. The tiles of an expert run one after the other: its
    operands stay in the cache."""
    experts, outputs, inputs = out.shape
    a = TensorDescriptor.from_tensor(grad_OP, [tile_m, BLOCK])
    b = TensorDescriptor.from_tensor(rows_IP, [tile_n, BLOCK])
    last = grad_scales.shape[1] - 1
    _gradient_kernel[(triton.cdiv(inputs, tile_n), triton.cdiv(outputs, tile_m), experts)](
        a, grad_scales, b, rows_scales, ends_E, out, outputs, inputs, *grad_scales.stride(), *rows_scales.stride(),
        last, experts, EXPERTS=triton.next_power_of_2(experts), M=tile_m, N=tile_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
