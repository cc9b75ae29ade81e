"""A token of each sequence in recurrent layers: its state is read once, where it is kept, and written back there.

A program has some columns of a head's state. Its reads of them are most of what the step reads at all. That of a
convolution has some channels of its tail.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.recurrent.gated_delta_rule import EPS
from headway.models.ops.recurrent.slots import SlotStates

_NUMBERS = 8192
"""Of a state, that a program has at a time."""
_CHANNELS = 256
"""Of a convolution, likewise."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _conv_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x, weight, bias, tails, slots, out, x_stride, channels, BEFORE: tl.constexpr, CHANNELS: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = c < channels
    kept = tails + tl.load(slots + token).to(tl.int64) * BEFORE * channels + c
    weights = weight + c * (BEFORE + 1)
    total = tl.zeros((CHANNELS,), tl.float32)
    for i in tl.static_range(BEFORE):
        earlier = tl.load(kept + i * channels, mask=real, other=0.0)
        total += earlier * tl.load(weights + i, mask=real, other=0.0).to(tl.float32)
        if i > 0:
            tl.store(kept + (i - 1) * channels, earlier, mask=real)
    own = tl.load(x + token * x_stride + c, mask=real, other=0.0).to(tl.float32)
    total += own * tl.load(weights + BEFORE, mask=real, other=0.0).to(tl.float32)
    if BEFORE > 0:
        tl.store(kept + (BEFORE - 1) * channels, own, mask=real)
    if BIASED:
        total += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
    tl.store(out + token * channels + c, total * tl.sigmoid(total), mask=real)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _own_part(  # type: ignore[no-untyped-def]
    states, slots, heads, DIM: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """The rows and the columns of this program's part of a state, and where it is kept."""
    d = tl.arange(0, WIDTH)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    row = (slot * heads + tl.program_id(1)) * DIM * VALUES
    return d, c, states + row + d[:, None] * VALUES + c[None, :]


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _delta_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    q, k, v, decays, betas, states, slots, out, q_stride, k_stride, v_stride, heads, scale, eps, GROUP: tl.constexpr,
    DIM: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, c, kept = _own_part(states, slots, heads, DIM, VALUES, WIDTH, COLUMNS)
    real, inside = d < DIM, (d < DIM)[:, None] & (c < VALUES)[None, :]
    state = tl.load(kept, mask=inside, other=0.0)
    key_head = head // GROUP * DIM
    query = tl.load(q + token * q_stride + key_head + d, mask=real, other=0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * scale
    key = tl.load(k + token * k_stride + key_head + d, mask=real, other=0.0).to(tl.float32)
    key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
    value = tl.load(v + token * v_stride + head * VALUES + c, mask=c < VALUES, other=0.0).to(tl.float32)
    beta = tl.load(betas + token * heads + head).to(tl.float32)
    state *= tl.exp(tl.load(decays + token * heads + head).to(tl.float32))
    correction = (value - tl.sum(key[:, None] * state, 0)) * beta
    state += key[:, None] * correction[None, :]
    tl.store(kept, state, mask=inside)
    tl.store(out + (token * heads + head) * VALUES + c, tl.sum(query[:, None] * state, 0), mask=c < VALUES)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _ssd_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x, steps, rates, inputs, readings, states, slots, out, x_stride, in_stride, read_stride, heads, GROUP: tl.constexpr,
    DIM: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, c, kept = _own_part(states, slots, heads, DIM, VALUES, WIDTH, COLUMNS)
    real, inside = d < DIM, (d < DIM)[:, None] & (c < VALUES)[None, :]
    state = tl.load(kept, mask=inside, other=0.0)
    group = head // GROUP * DIM
    written = tl.load(inputs + token * in_stride + group + d, mask=real, other=0.0).to(tl.float32)
    reading = tl.load(readings + token * read_stride + group + d, mask=real, other=0.0).to(tl.float32)
    step = tl.load(steps + token * heads + head).to(tl.float32)
    value = tl.load(x + token * x_stride + head * VALUES + c, mask=c < VALUES, other=0.0).to(tl.float32) * step
    state = state * tl.exp(step * tl.load(rates + head).to(tl.float32)) + written[:, None] * value[None, :]
    tl.store(kept, state, mask=inside)
    tl.store(out + (token * heads + head) * VALUES + c, tl.sum(reading[:, None] * state, 0), mask=c < VALUES)


def conv_step(
    x_TC: Tensor,
    weight_C1W: Tensor,
    bias_C: Tensor | None,
    lengths: Sequence[int],
    tails_SWC: SlotStates,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, SlotStates]:
    """`causal_conv` of one token of each sample."""
    x = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    (tokens, channels), weight = x.shape, weight_C1W.contiguous()
    assert tails_SWC.tensor.is_contiguous()
    out = torch.empty((tokens, channels), dtype=torch.float32, device=x.device)
    _conv_kernel[tokens, triton.cdiv(channels, _CHANNELS)](
        x, weight, weight if bias_C is None else bias_C, *tails_SWC, out, x.stride(0), channels,
        weight.shape[-1] - 1, _CHANNELS, bias_C is not None,
    )  # fmt: skip
    return out, tails_SWC


def delta_step(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    lengths: Sequence[int],
    initial_SHDV: SlotStates,
) -> tuple[Tensor, SlotStates]:
    """`gated_delta_rule` of one token of each sample."""
    q, k, v = (_dense_heads(x) for x in (q_TKD, k_TKD, v_THV))
    grid, out, tile = _tiling(v, initial_SHDV, q.shape[1])
    _delta_kernel[grid](
        q, k, v, decay_TH.contiguous(), beta_TH.contiguous(), *initial_SHDV, out, q.stride(0), k.stride(0), v.stride(0),
        v.shape[1], q.shape[2] ** -0.5, EPS, **tile,
    )  # fmt: skip
    return out, initial_SHDV


def ssd_step(
    x_THP: Tensor,
    step_TH: Tensor,
    rate_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    lengths: Sequence[int],
    initial_SHNP: SlotStates,
) -> tuple[Tensor, SlotStates]:
    """`ssd_scan` of one token of each sample."""
    x, b, c = (_dense_heads(each) for each in (x_THP, b_TGN, c_TGN))
    grid, out, tile = _tiling(x, initial_SHNP, b.shape[1])
    _ssd_kernel[grid](
        x, step_TH.contiguous(), rate_H.contiguous(), b, c, *initial_SHNP, out, x.stride(0), b.stride(0), c.stride(0),
        x.shape[1], **tile,
    )  # fmt: skip
    return out, initial_SHNP


def _dense_heads(x_THD: Tensor) -> Tensor:
    """Tokens may be apart, as parts of a wider tensor are; a token's heads must be dense."""
    dense = x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]
    return x_THD if dense else x_THD.contiguous()


def _tiling(v_THV: Tensor, states: SlotStates, groups: int) -> tuple[tuple[int, int, int], Tensor, dict[str, int]]:
    """The programs, room for outputs, and the sizes that kernels are compiled for."""
    (tokens, heads, values), size = v_THV.shape, states.tensor.shape[2]
    assert states.tensor.is_contiguous()
    width = triton.next_power_of_2(size)
    columns = min(max(1, _NUMBERS // width), triton.next_power_of_2(values))
    out = torch.empty((tokens, heads, values), dtype=torch.float32, device=v_THV.device)
    tile = {"GROUP": heads // groups, "DIM": size, "VALUES": values, "WIDTH": width, "COLUMNS": columns}
    return (tokens, heads, triton.cdiv(values, columns)), out, tile
