"""Kernels of serving passes over rows, without gradients: norms, sums with norms, the gate of an MLP."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _norm_kernel(x, delta, weight, total, out, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * size + column
    inside = column < size
    value = tl.load(x + at, inside, other=0.0)
    if ADD:
        # Rounded as the stream is stored, so that the norm is that of the stored sum.
        value = (value.to(tl.float32) + tl.load(delta + at, inside, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(total + at, value, inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    gain = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(out + at, wide * scale * gain, inside)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _gate_kernel(gate, up, out, gate_stride, up_stride, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    g = tl.load(gate + row * gate_stride + column, inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, g * tl.sigmoid(g) * u, inside)


def rms_norm(x_TD: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `F.rms_norm` over the last axis."""
    x_TD = x_TD.contiguous()
    out = torch.empty_like(x_TD)
    rows, size = x_TD.shape
    block = triton.next_power_of_2(size)
    _norm_kernel[(rows,)](x_TD, x_TD, weight, out, out, size, eps, ADD=False, BLOCK=block, num_warps=_warps(block))
    return out


def added_norm(stream_TD: Tensor, delta_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of the first two, and its `rms_norm`."""
    stream_TD, delta_TD = stream_TD.contiguous(), delta_TD.contiguous()
    total, out = torch.empty_like(stream_TD), torch.empty_like(stream_TD)
    rows, size = stream_TD.shape
    block = triton.next_power_of_2(size)
    _norm_kernel[(rows,)](
        stream_TD, delta_TD, weight, total, out, size, eps, ADD=True, BLOCK=block, num_warps=_warps(block)
    )
    return total, out


def gated_silu(gate_TM: Tensor, up_TM: Tensor) -> Tensor:
    """silu(gate) * up of two matrices, each of whose rows lie close, as those of one product's halves do."""
    rows, size = gate_TM.shape
    out = torch.empty((rows, size), dtype=gate_TM.dtype, device=gate_TM.device)
    _gate_kernel[(rows, triton.cdiv(size, _BLOCK))](
        gate_TM, up_TM, out, gate_TM.stride(0), up_TM.stride(0), size, BLOCK=_BLOCK
    )
    return out


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))
