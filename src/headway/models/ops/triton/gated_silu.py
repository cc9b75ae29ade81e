"""silu(gate) * up in one kernel, forward and backward; only its inputs are kept. Both are two tensors, or the halves
of one."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.fp8.blocks import Fp8Blocks
from headway.models.ops.triton.fp8 import empty_rows, store_row_blocks

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _forward_kernel(gate, up, out, size, gate_stride, up_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    g = tl.load(gate + row * gate_stride + column, column < size).to(tl.float32)
    u = tl.load(up + row * up_stride + column, column < size).to(tl.float32)
    tl.store(out + row * size + column, g * tl.sigmoid(g) * u, column < size)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _fp8_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    gate, up, out, values, scales, size, gate_stride, up_stride, scales_stride, BLOCK: tl.constexpr
):
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    inside = column < size
    g = tl.load(gate + row * gate_stride + column, inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, inside, other=0.0).to(tl.float32)
    # Quantized as the stored numbers would be.
    active = (g * tl.sigmoid(g) * u).to(out.dtype.element_ty)
    tl.store(out + row * size + column, active, inside)
    store_row_blocks(active, values, scales, row, first, size, scales_stride, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _backward_kernel(gate, up, grad, grad_gate, grad_up, size, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    at = row * stride + column
    g = tl.load(gate + at, column < size).to(tl.float32)
    u = tl.load(up + at, column < size).to(tl.float32)
    d = tl.load(grad + row * size + column, column < size).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(grad_gate + at, d * u * s * (1 + g * (1 - s)), column < size)
    tl.store(grad_up + at, d * g * s, column < size)


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grads = torch.empty_like(gate), torch.empty_like(up)
        _backward(gate, up, grad, *grads)
        return grads


class _GatedHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_TM: Tensor) -> Tensor:
        both_TM = both_TM.contiguous()
        ctx.save_for_backward(both_TM)
        gate, up = both_TM.chunk(2, 1)
        return _forward(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both_TM,) = ctx.saved_tensors
        grad_both = torch.empty_like(both_TM)
        gate, up = both_TM.chunk(2, 1)
        _backward(gate, up, grad, *grad_both.chunk(2, 1))
        return grad_both


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = _GatedSilu.apply(gate, up)  # type: ignore[no-untyped-call]  # torch has no types here
    return out


def gated_halves(both_TM: Tensor, up: None = None) -> Tensor:
    out: Tensor = _GatedHalves.apply(both_TM)  # type: ignore[no-untyped-call]  # as above
    return out


def gated_silu_serving(gate_TM: Tensor, up_TM: Tensor) -> Tensor:
    """Rows may be apart, as those of one product's halves are; within a row all must be dense."""
    return _forward(gate_TM, up_TM)


def gated_silu_fp8(gate_TM: Tensor, up_TM: Tensor) -> tuple[Tensor, Fp8Blocks]:
    """Rows as `gated_silu_serving` takes them."""
    out = torch.empty(gate_TM.shape, dtype=gate_TM.dtype, device=gate_TM.device)
    blocks = empty_rows(len(gate_TM), gate_TM.shape[1], gate_TM.device)
    if grid := _grid(gate_TM):
        _fp8_kernel[grid](
            gate_TM, up_TM, out, *blocks, gate_TM.shape[1], gate_TM.stride(0), up_TM.stride(0),
            blocks.scales.stride(1), BLOCK=_BLOCK,
        )  # fmt: skip
    return out, blocks


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if grid := _grid(gate):
        _forward_kernel[grid](gate, up, out, gate.shape[-1], gate.stride(-2), up.stride(-2), BLOCK=_BLOCK)
    return out


def _backward(gate: Tensor, up: Tensor, grad: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
    """Fills the last two, which are laid out as the first two."""
    if grid := _grid(gate):
        grad = grad.contiguous()
        _backward_kernel[grid](gate, up, grad, grad_gate, grad_up, gate.shape[-1], gate.stride(-2), BLOCK=_BLOCK)


def _grid(x: Tensor) -> tuple[int, int] | None:
    """Rows by blocks of columns."""
    return (x.numel() // x.shape[-1], triton.cdiv(x.shape[-1], _BLOCK)) if x.numel() else None
