"""Convolutions of whole samples: a program has some tokens of some channels, and reads the tokens before them again.

The backward pass computes what went into SiLU again, leaves its gradient, and from that the gradient of the inputs;
the gradients of weights and bias are sums over programs.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _CHANNELS = 32, 128
"""Of a program."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _weighted(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x, weights, bias, tails, ages, samples, t, c, stride, tokens, channels, WIDTH: tl.constexpr, BIASED: tl.constexpr,
    GOES_ON: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The sum that SiLU gets. `GOES_ON`: samples have tails before them."""
    age = tl.load(ages + t, mask=t < tokens, other=-1)
    if GOES_ON:
        tail = (tl.load(samples + t, mask=t < tokens, other=0) + 1) * (WIDTH - 1) + age
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        inside = (age >= back)[:, None] & (c < channels)[None, :]
        row = tl.load(x + (t - back)[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        if GOES_ON:
            inside = ((age >= 0) & (age < back))[:, None] & (c < channels)[None, :]
            row += tl.load(tails + (tail - back)[:, None] * channels + c[None, :], mask=inside, other=0.0)
        total += row * tl.load(weights + c * WIDTH + tap, mask=c < channels, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias + c, mask=c < channels, other=0.0)[None, :]
    return total


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _forward_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x, weights, bias, tails, ages, samples, out, stride, tokens, channels, WIDTH: tl.constexpr, BIASED: tl.constexpr,
    GOES_ON: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = _weighted(
        x, weights, bias, tails, ages, samples, t, c, stride, tokens, channels, WIDTH, BIASED, GOES_ON, TOKENS, CHANNELS
    )
    inside = (t < tokens)[:, None] & (c < channels)[None, :]
    tl.store(out + t[:, None] * channels + c[None, :], total * tl.sigmoid(total), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _sums_back_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x, weights, bias, ages, d_out, d_total, d_weights, d_bias, stride, tokens, channels, WIDTH: tl.constexpr,
    BIASED: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    t = block * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = _weighted(
        x, weights, bias, x, ages, ages, t, c, stride, tokens, channels, WIDTH, BIASED, False, TOKENS, CHANNELS
    )
    inside = (t < tokens)[:, None] & (c < channels)[None, :]
    place = t[:, None] * channels + c[None, :]
    gate = tl.sigmoid(total)
    grad = tl.load(d_out + place, mask=inside, other=0.0) * gate * (1 + total * (1 - gate))
    tl.store(d_total + place, grad, mask=inside)
    age = tl.load(ages + t, mask=t < tokens, other=-1)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        reached = (age >= back)[:, None] & (c < channels)[None, :]
        row = tl.load(x + (t - back)[:, None] * stride + c[None, :], mask=reached, other=0.0).to(tl.float32)
        tl.store(d_weights + (block * WIDTH + tap) * channels + c, tl.sum(grad * row, 0), mask=c < channels)
    if BIASED:
        tl.store(d_bias + block * channels + c, tl.sum(grad, 0), mask=c < channels)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _inputs_back_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    d_total, weights, ages, d_x, tokens, channels, WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    found = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for ahead in tl.static_range(WIDTH):
        reaches = (t + ahead < tokens) & (tl.load(ages + t + ahead, mask=t + ahead < tokens, other=-1) >= ahead)
        inside = reaches[:, None] & (c < channels)[None, :]
        grad = tl.load(d_total + (t + ahead)[:, None] * channels + c[None, :], mask=inside, other=0.0)
        found += grad * tl.load(weights + c * WIDTH + WIDTH - 1 - ahead, mask=c < channels, other=0.0)[None, :]
    inside = (t < tokens)[:, None] & (c < channels)[None, :]
    tl.store(d_x + t[:, None] * channels + c[None, :], found, mask=inside)


class _SampleConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ages: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(ages, x, weight, bias)
        return _forward(x, weight, bias, ages)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ages, x, weight, bias = ctx.saved_tensors
        grid, (tokens, channels), width = _grid(x), x.shape, weight.shape[-1]
        d_total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        d_weights = d_total.new_empty(grid[0], width, channels)
        d_bias = None if bias is None else d_total.new_empty(grid[0], channels)
        _sums_back_kernel[grid](
            x, weight, weight if bias is None else bias, ages, grads[0].contiguous(), d_total, d_weights,
            d_weights if d_bias is None else d_bias, x.stride(0), tokens, channels, BIASED=bias is not None,
            **_sizes(width),
        )  # fmt: skip
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _inputs_back_kernel[grid](d_total, weight, ages, d_x, tokens, channels, **_sizes(width))
        return None, d_x, d_weights.sum(0).T.unsqueeze(1), None if d_bias is None else d_bias.sum(0)


def conv_samples(
    x_TC: Tensor,
    weight_C1W: Tensor,
    bias_C: Tensor | None,
    lengths: Sequence[int],
    tails_SWC: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    x = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    before = weight_C1W.shape[-1] - 1
    weight, bias = weight_C1W.float().contiguous(), None if bias_C is None else bias_C.float()
    where = _layout(tuple(lengths), before, x.device)
    last = x.index_select(0, where.ends)
    if tails_SWC is None:
        out: Tensor = _SampleConv.apply(where.ages, x, weight, bias)  # type: ignore[no-untyped-call]  # torch has no types here
        tails = last * where.exist
    else:
        out = _forward(x, weight, bias, where.ages, tails_SWC.contiguous(), where.samples)
        older = tails_SWC.flatten(0, 1).index_select(0, where.older)
        tails = torch.where(where.exist, last.to(older.dtype), older)
    return out, tails.view(len(lengths), before, x.shape[1])


def _forward(
    x_TC: Tensor,
    weight_C1W: Tensor,
    bias_C: Tensor | None,
    ages_T: Tensor,
    tails_SWC: Tensor | None = None,
    samples_T: Tensor | None = None,
) -> Tensor:
    out_TC = torch.empty(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    # Pointers that nothing is read from stand in for what is not there.
    bias, tails = weight_C1W if bias_C is None else bias_C, x_TC if tails_SWC is None else tails_SWC
    _forward_kernel[_grid(x_TC)](
        x_TC, weight_C1W, bias, tails, ages_T, ages_T if samples_T is None else samples_T, out_TC, x_TC.stride(0),
        *x_TC.shape, BIASED=bias_C is not None, GOES_ON=tails_SWC is not None, **_sizes(weight_C1W.shape[-1]),
    )  # fmt: skip
    return out_TC


def _grid(x_TC: Tensor) -> tuple[int, int]:
    return triton.cdiv(x_TC.shape[0], _TOKENS), triton.cdiv(x_TC.shape[1], _CHANNELS)


def _sizes(width: int) -> dict[str, int]:
    return {"WIDTH": width, "TOKENS": _TOKENS, "CHANNELS": _CHANNELS}


class _Layout(NamedTuple):
    """Places of tokens: how many of its sample are before each, and which sample that is; where the last ones of
    samples are, which of these exist, and what of the tail before stands there otherwise."""

    ages: Tensor
    samples: Tensor
    ends: Tensor
    exist: Tensor
    older: Tensor


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _layout(lengths: tuple[int, ...], before: int, device: torch.device) -> _Layout:
    sizes, numbers = np.array(lengths, dtype=np.int64), np.arange(len(lengths))
    last, back = np.cumsum(sizes), np.arange(before, 0, -1)
    ages = np.arange(sizes.sum()) - np.repeat(last - sizes, sizes)
    ends = np.maximum(last[:, None] - back, 0).flatten()
    missing = np.maximum(back - sizes[:, None], 0)
    older = (numbers[:, None] * before + np.minimum(before - missing, before - 1)).flatten()
    made = (
        torch.from_numpy(each).to(device)
        for each in (
            ages.astype(np.int32),
            np.repeat(numbers, sizes).astype(np.int32),
            ends,
            (missing == 0).reshape(-1, 1),
            older,
        )
    )
    return _Layout(*made)
