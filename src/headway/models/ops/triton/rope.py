"""Rotary positions in one kernel: half precision in and out, float32 in between, nothing kept for the backward pass."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 8


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _rope_kernel(x, cos, sin, out, rows, heads, half, direction, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < half)
    first = row.to(tl.int64) * (2 * half) + column
    table = (row // heads).to(tl.int64) * (2 * half) + column
    c = tl.load(cos + table, mask)
    s = tl.load(sin + table + half, mask) * direction
    a = tl.load(x + first, mask).to(tl.float32)
    b = tl.load(x + first + half, mask).to(tl.float32)
    tl.store(out + first, a * c - b * s, mask)
    tl.store(out + first + half, b * c + a * s, mask)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _launch(x_THD, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _launch(grad_THD, cos, sin, -1.0), None, None


def rope(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient is the rotation the other way."""
    out: Tensor = _Rope.apply(x_THD, cos, sin)  # type: ignore[no-untyped-call]  # torch has no types here
    return out


def _launch(x_THD: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    x_THD = x_THD.contiguous()
    tokens, heads, size = x_THD.shape
    out = torch.empty_like(x_THD)
    grid = (triton.cdiv(tokens * heads, _ROWS),)
    block = triton.next_power_of_2(size // 2)
    _rope_kernel[grid](x_THD, cos, sin, out, tokens * heads, heads, size // 2, direction, ROWS=_ROWS, BLOCK=block)
    return out
