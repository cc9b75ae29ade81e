"""Queries and keys at their positions, with gradients: norm per head and rotation in one kernel, each way."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
_PROGRAMS = 1024
"""Of the backward pass: each adds up its rows' part of the weight's gradient."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _forward_kernel(x, weight, cos, sin, out, rows, heads, eps, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler  # fmt: skip  # noqa: E501
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < HALF)
    at = row.to(tl.int64) * (2 * HALF) + column
    table = (row // heads).to(tl.int64) * (2 * HALF) + column
    a = tl.load(x + at, inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    a = a * scale * tl.load(weight + column, column < HALF, other=0.0).to(tl.float32)
    b = b * scale * tl.load(weight + HALF + column, column < HALF, other=0.0).to(tl.float32)
    c = tl.load(cos + table, inside, other=0.0)
    s = tl.load(sin + table + HALF, inside, other=0.0)
    tl.store(out + at, a * c - b * s, inside)
    tl.store(out + at + HALF, b * c + a * s, inside)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _backward_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x,
    weight,
    cos,
    sin,
    grad,
    grad_x,
    grad_weight,
    rows,
    heads,
    eps,
    WEIGHT: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    gain_a = tl.load(weight + column, column < HALF, other=0.0).to(tl.float32)
    gain_b = tl.load(weight + HALF + column, column < HALF, other=0.0).to(tl.float32)
    summed_a = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    summed_b = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(first * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < HALF)
        at = row.to(tl.int64) * (2 * HALF) + column
        table = (row // heads).to(tl.int64) * (2 * HALF) + column
        a = tl.load(x + at, inside, other=0.0).to(tl.float32)
        b = tl.load(x + at + HALF, inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a = a * scale
        b = b * scale
        c = tl.load(cos + table, inside, other=0.0)
        s = tl.load(sin + table + HALF, inside, other=0.0)
        turned_a = tl.load(grad + at, inside, other=0.0).to(tl.float32)
        turned_b = tl.load(grad + at + HALF, inside, other=0.0).to(tl.float32)
        da = turned_a * c + turned_b * s
        db = turned_b * c - turned_a * s
        if WEIGHT:
            summed_a += da * a
            summed_b += db * b
        da = da * gain_a
        db = db * gain_b
        mean = ((tl.sum(da * a, 1) + tl.sum(db * b, 1)) / (2 * HALF))[:, None]
        tl.store(grad_x + at, (da - a * mean) * scale, inside)
        tl.store(grad_x + at + HALF, (db - b * mean) * scale, inside)
    if WEIGHT:
        to = grad_weight + first.to(tl.int64) * (2 * HALF) + tl.arange(0, BLOCK)
        tl.store(to, tl.sum(summed_a, 0), tl.arange(0, BLOCK) < HALF)
        tl.store(to + HALF, tl.sum(summed_b, 0), tl.arange(0, BLOCK) < HALF)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        x_THD = x_THD.contiguous()
        ctx.save_for_backward(x_THD, weight, cos, sin)
        ctx.eps = eps
        tokens, heads, size = x_THD.shape
        out = torch.empty_like(x_THD)
        if rows := tokens * heads:
            _forward_kernel[(triton.cdiv(rows, _ROWS),)](
                x_THD, weight, cos, sin, out, rows, heads, eps, size // 2, _ROWS, triton.next_power_of_2(size // 2)
            )
        return out

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x_THD, weight, cos, sin = ctx.saved_tensors
        tokens, heads, size = x_THD.shape
        rows, wants_weight = tokens * heads, ctx.needs_input_grad[1]
        programs = max(1, min(triton.cdiv(rows, _ROWS), _PROGRAMS))
        grad_THD, grad_x = grad_THD.contiguous(), torch.empty_like(x_THD)
        parts = torch.empty(programs, size, dtype=torch.float32, device=x_THD.device) if wants_weight else cos
        _backward_kernel[(programs,)](
            x_THD, weight, cos, sin, grad_THD, grad_x, parts, rows, heads, ctx.eps, wants_weight, size // 2, _ROWS,
            triton.next_power_of_2(size // 2),
        )  # fmt: skip
        return grad_x, parts.sum(0).to(weight.dtype) if wants_weight else None, None, None, None


def turned(x_THD: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """As `layers.rope.rotate_plain` of `F.rms_norm` over the last axis, rounded once at the end."""
    out: Tensor = _Turned.apply(x_THD, weight, eps, cos, sin)  # type: ignore[no-untyped-call]  # torch has no types here
    return out
