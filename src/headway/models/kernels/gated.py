"""silu(gate) * up in one kernel, forward and backward; only its inputs are kept."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _forward_kernel(gate, up, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, at < size).to(tl.float32)
    u = tl.load(up + at, at < size).to(tl.float32)
    tl.store(out + at, g * tl.sigmoid(g) * u, at < size)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _backward_kernel(gate, up, grad, grad_gate, grad_up, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, at < size).to(tl.float32)
    u = tl.load(up + at, at < size).to(tl.float32)
    d = tl.load(grad + at, at < size).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(grad_gate + at, d * u * s * (1 + g * (1 - s)), at < size)
    tl.store(grad_up + at, d * g * s, at < size)


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _forward_kernel[_grid(gate)](gate, up, out, gate.numel(), BLOCK=_BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        grad = grad.contiguous()
        _backward_kernel[_grid(gate)](gate, up, grad, grad_gate, grad_up, gate.numel(), BLOCK=_BLOCK)
        return grad_gate, grad_up


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """As `layers.mlp.gated_silu`."""
    out: Tensor = _GatedSilu.apply(gate, up)  # type: ignore[no-untyped-call]  # torch has no types here
    return out


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), _BLOCK),)
