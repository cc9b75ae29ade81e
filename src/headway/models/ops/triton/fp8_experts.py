"""Products of experts in FP8: rows lie in the order of their experts, and a tile has rows of one of them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.fp8 import BLOCK

_SIDE: tl.constexpr = tl.constexpr(BLOCK)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _grouped_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    a, a_scales, b, b_scales, ends, out, outputs, depth, a_scales_row, a_scales_step, experts,
    EXPERTS: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    e = tl.arange(0, EXPERTS)
    end = tl.load(ends + e, e < experts, other=0)
    start = tl.load(ends + e - 1, (e > 0) & (e < experts), other=0)
    tiles = tl.where(e < experts, (end - start + M - 1) // M, 0)
    after = tl.cumsum(tiles, 0)
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    if expert < experts:
        mine = e == expert
        before = tl.sum(tl.where(mine, after - tiles, 0), 0)
        m = tl.sum(tl.where(mine, start, 0), 0) + (tile - before) * M + tl.arange(0, M)
        rows = tl.sum(tl.where(mine, end, 0), 0)
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


def fp8_grouped_matmul(
    a_NK: Tensor, a_scales: Tensor, b_EOK: Tensor, b_scales: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    a_NK, b_EOK, b_scales = a_NK.contiguous(), b_EOK.contiguous(), b_scales.contiguous()
    rows, (experts, outputs, depth) = len(a_NK), b_EOK.shape
    out = torch.empty((rows, outputs), dtype=dtype, device=a_NK.device)
    if not rows:
        return out
    mean = rows / experts
    tile_m = 16 if mean <= 16 else 32 if mean <= 32 else 64 if mean <= 128 else 128
    tile_n = 64 if tile_m < 64 else 128
    # As many tiles of rows as there can be: each expert's last one may not be full.
    grid = triton.cdiv(outputs, tile_n), triton.cdiv(rows, tile_m) + experts
    _grouped_kernel[grid](
        a_NK, a_scales, b_EOK, b_scales, ends_E, out, outputs, depth, *a_scales.stride(), experts,
        EXPERTS=triton.next_power_of_2(experts), EVEN=depth % BLOCK == 0, N=tile_n, M=tile_m,
        num_warps=8 if tile_m == 128 else 4, num_stages=3 if tile_m == 128 else 4,
    )  # fmt: skip
    return out
