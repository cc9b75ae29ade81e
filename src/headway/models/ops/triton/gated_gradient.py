"""A row of an expert's backward pass between its two products, read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDEST = 4096
"""Columns that a program has at a time."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    wide, grad, weights, grad_wide, grad_weights, weighted, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    by_weight = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate_at, up_at = row * 2 * width + column, row * 2 * width + width + column
        g = tl.load(wide + gate_at, inside, other=0.0).to(tl.float32)
        u = tl.load(wide + up_at, inside, other=0.0).to(tl.float32)
        d = tl.load(grad + row * width + column, inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        hidden = g * s * u
        by_weight += hidden * d
        d *= weight
        tl.store(grad_wide + gate_at, d * u * s * (1 + g * (1 - s)), inside)
        tl.store(grad_wide + up_at, d * g * s, inside)
        tl.store(weighted + row * width + column, hidden * weight, inside)
    tl.store(grad_weights + row, tl.sum(by_weight, 0))


def gated_gradient(wide_NM: Tensor, grad_NI: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide_NM, grad_NI, weights_N = wide_NM.contiguous(), grad_NI.contiguous(), weights_N.contiguous()
    rows, width = grad_NI.shape
    out = torch.empty_like(wide_NM), torch.empty_like(weights_N), torch.empty_like(grad_NI)
    if rows:
        block = min(triton.next_power_of_2(width), _WIDEST)
        _kernel[(rows,)](wide_NM, grad_NI, weights_N, *out, width, BLOCK=block, num_warps=4 if block <= 1024 else 8)
    return out
