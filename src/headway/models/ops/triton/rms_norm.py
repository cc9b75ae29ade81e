"""Root-mean-square norms, alone or of a sum: one kernel forward, one backward; for serving nothing is kept."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.fp8.blocks import BLOCK, Fp8Blocks
from headway.models.ops.triton.fp8 import empty_rows, store_row_blocks

_PROGRAMS = 1024
"""Programs of the backward pass: each adds up its rows' part of the weight's gradient."""


@triton.jit
def norm_row(value, weight, column, inside, size, eps):  # type: ignore[no-untyped-def]
    """The norm of a row of numbers, in float32."""
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    return wide * scale * tl.load(weight + column, inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _sum(value, delta, at, inside, size, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`value` and `delta`, or the sum of its PARTS: rounded as the stream is stored, so that the norm is that of the
    stored sum."""
    if PARTS == 0:
        added = tl.load(delta + at, inside, other=0.0).to(tl.float32)
    else:
        added = tl.zeros(value.shape, tl.float32)
        for part in tl.static_range(PARTS):
            added += tl.load(delta + part * size * tl.num_programs(0) + at, inside, other=0.0)
        added = added.to(value.dtype).to(tl.float32)
    return (value.to(tl.float32) + added).to(value.dtype)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _forward_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x, delta, weight, total, out, scales, size, eps, ADD: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at = row * size + column
    inside = column < size
    value = tl.load(x + at, inside, other=0.0)
    if ADD:
        value = _sum(value, delta, at, inside, size, PARTS)
        tl.store(total + at, value, inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    if KEEP:
        tl.store(scales + row, scale)
    gain = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(out + at, wide * scale * gain, inside)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _backward_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x, weight, scales, grad, grad_total, grad_x, grad_weight, rows, size, ADD: tl.constexpr, WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < size
    gain = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    summed = tl.zeros((BLOCK,), dtype=tl.float32)
    at = first.to(tl.int64) * size + column
    for row in range(first, rows, tl.num_programs(0)):
        scale = tl.load(scales + row)
        normed = tl.load(x + at, inside, other=0.0).to(tl.float32) * scale
        d = tl.load(grad + at, inside, other=0.0).to(tl.float32)
        if WEIGHT:
            summed += d * normed
        d = d * gain
        d = (d - normed * (tl.sum(d * normed, 0) / size)) * scale
        if ADD:
            d += tl.load(grad_total + at, inside, other=0.0).to(tl.float32)
        tl.store(grad_x + at, d, inside)
        at += tl.num_programs(0) * size
    if WEIGHT:
        tl.store(grad_weight + first.to(tl.int64) * size + column, summed, inside)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _add_fp8_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x, delta, weight, total, out, values, scales, size, scales_stride, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at = row * size + column
    inside = column < size
    value = _sum(tl.load(x + at, inside, other=0.0), delta, at, inside, size, PARTS)
    tl.store(total + at, value, inside)
    normed = norm_row(value, weight, column, inside, size, eps).to(value.dtype)
    tl.store(out + at, normed, inside)
    store_row_blocks(normed, values, scales, row, 0, size, scales_stride, BLOCK)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_TD = x_TD.contiguous()
        out = torch.empty_like(x_TD)
        scales_T = _scales(x_TD)
        _norm(x_TD, None, weight, eps, out, out, scales_T)
        ctx.save_for_backward(x_TD, weight, scales_T)
        return out

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return *_gradients(ctx.saved_tensors, grad_TD, None, ctx.needs_input_grad[1]), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, delta_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x_TD = x_TD.contiguous()
        total, out = torch.empty_like(x_TD), torch.empty_like(x_TD)
        scales_T = _scales(x_TD)
        _norm(x_TD, delta_TD.contiguous(), weight, eps, total, out, scales_T)
        ctx.save_for_backward(total, weight, scales_T)
        return total, out

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_TD: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        grad_x, grad_weight = _gradients(ctx.saved_tensors, grad_TD, grad_total.contiguous(), ctx.needs_input_grad[2])
        return grad_x, grad_x, grad_weight, None


def rms_norm(x_TD: Tensor, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = _Norm.apply(x_TD, weight, eps)  # type: ignore[no-untyped-call]  # torch has no types here
    return out


def add_rms_norm(x_TD: Tensor, delta_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, out = _AddNorm.apply(x_TD, delta_TD, weight, eps)  # type: ignore[no-untyped-call]  # as above
    return total, out


def rms_norm_serving(x_TD: Tensor, weight: Tensor, eps: float) -> Tensor:
    x_TD = x_TD.contiguous()
    out = torch.empty_like(x_TD)
    _norm(x_TD, None, weight, eps, out, out, None)
    return out


def add_rms_norm_serving(x_TD: Tensor, delta_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_TD = x_TD.contiguous()
    total, out = torch.empty_like(x_TD), torch.empty_like(x_TD)
    _norm(x_TD, delta_TD.contiguous(), weight, eps, total, out, None)
    return total, out


def add_rms_norm_fp8(x_TD: Tensor, delta_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Fp8Blocks]:
    x_TD = x_TD.contiguous()
    rows, size = x_TD.shape
    total, out, blocks = torch.empty_like(x_TD), torch.empty_like(x_TD), empty_rows(rows, size, x_TD.device)
    if rows:
        block = max(BLOCK, triton.next_power_of_2(size))
        _add_fp8_kernel[(rows,)](
            x_TD, delta_TD.contiguous(), weight, total, out, *blocks, size, blocks.scales.stride(1), eps,
            PARTS=_parts(delta_TD), BLOCK=block, num_warps=norm_warps(block, 1),
        )  # fmt: skip
    return total, out, blocks


def _scales(x_TD: Tensor) -> Tensor:
    return torch.empty(len(x_TD), dtype=torch.float32, device=x_TD.device)


def _norm(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    weight: Tensor,
    eps: float,
    total: Tensor,
    out: Tensor,
    scales_T: Tensor | None,
) -> None:
    """Fill `total` and `out`, and, where they are kept for the backward pass, what each row was scaled by."""
    rows, size = x_TD.shape
    if rows:
        delta, scales = x_TD if delta_TD is None else delta_TD, out if scales_T is None else scales_T
        block = triton.next_power_of_2(size)
        warps = norm_warps(block, 1 if scales_T is None else 4)
        _forward_kernel[(rows,)](
            x_TD, delta, weight, total, out, scales, size, eps, ADD=delta_TD is not None, PARTS=_parts(delta),
            KEEP=scales_T is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip


def _gradients(
    saved: tuple[Tensor, Tensor, Tensor], grad_TD: Tensor, grad_total: Tensor | None, wants_weight: bool
) -> tuple[Tensor, Tensor | None]:
    x_TD, weight, scales_T = saved
    rows, size = x_TD.shape
    programs = max(1, min(rows, _PROGRAMS))
    grad_TD, grad_x = grad_TD.contiguous(), torch.empty_like(x_TD)
    parts = torch.empty(programs, size, dtype=torch.float32, device=x_TD.device) if wants_weight else scales_T
    block = triton.next_power_of_2(size)
    added = grad_TD if grad_total is None else grad_total
    _backward_kernel[(programs,)](
        x_TD, weight, scales_T, grad_TD, added, grad_x, parts, rows, size, grad_total is not None, wants_weight,
        block, num_warps=norm_warps(block, 4),
    )  # fmt: skip
    return grad_x, parts.sum(0).to(weight.dtype) if wants_weight else None


def _parts(delta: Tensor) -> int:
    """The number of parts (S, T, D) whose sum is to be added, 0 for one that is summed."""
    return len(delta) if delta.dim() == 3 else 0


def norm_warps(block: int, least: int) -> int:
    """Warps for rows of so many numbers."""
    return min(16, max(least, block // 512))
