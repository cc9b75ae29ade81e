"""One token from each row of logits, with its logprob, in two passes over blocks of the vocabulary."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _measure_kernel(logits, temperature, peaks, sums, places, size, stride, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    """Each block's largest logit, where it first is, and the sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, at < size, other=float("-inf")).to(tl.float32)
    x = x / tl.load(temperature + row).to(tl.float32)
    peak = tl.max(x, 0)
    ground = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + row * blocks + block, peak)
    tl.store(sums + row * blocks + block, tl.sum(tl.exp(x - ground), 0))
    tl.store(places + row * blocks + block, tl.min(tl.where(x == peak, at, size), 0))


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _pick_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    logits, temperature, noise, peaks, sums, places, tokens, logprobs, size, stride, blocks, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    peak = tl.load(peaks + row * blocks + b, b < blocks, other=float("-inf"))
    highest = tl.max(peak, 0)
    mass = tl.load(sums + row * blocks + b, b < blocks, other=0.0) * tl.exp(peak - highest)
    mass = tl.where(b < blocks, mass, 0.0)
    running = tl.cumsum(mass, 0)
    total = tl.sum(mass, 0)
    u = tl.load(noise + row).to(tl.float32)
    heat = tl.load(temperature + row).to(tl.float32)

    # The first block in which the sum exceeds the target; the last with any mass where rounding leaves none.
    target = u * total
    last = tl.max(tl.where(mass > 0, b, 0), 0)
    block = tl.minimum(tl.min(tl.where((running > target) & (mass > 0), b, BLOCKS), 0), last)
    before = tl.sum(tl.where(b < block, mass, 0.0), 0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, at < size, other=float("-inf")).to(tl.float32) / heat
    weight = tl.exp(x - highest)
    reached = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
    end = tl.max(tl.where(weight > 0, at, 0), 0)
    drawn = tl.minimum(tl.min(tl.where(reached, at, size), 0), end)

    # A noise below 0 asks for the most likely token.
    top = tl.min(tl.where(peak == highest, tl.load(places + row * blocks + b, b < blocks, other=size), size), 0)
    token = tl.where(u < 0, top, drawn)
    chosen = tl.load(logits + row * stride + tl.minimum(token, size - 1)).to(tl.float32) / heat
    tl.store(tokens + row, tl.minimum(token, size - 1))
    tl.store(logprobs + row, chosen - highest - tl.log(total))


def draw_tokens(logits_NV: Tensor, temperature_N: Tensor, noise_N: Tensor) -> tuple[Tensor, Tensor]:
    """A row gives the same in any batch."""
    rows, size = logits_NV.shape
    device = logits_NV.device
    blocks = triton.cdiv(size, _BLOCK)
    peaks = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    sums, places = torch.empty_like(peaks), torch.empty_like(peaks, dtype=torch.int32)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    stride = logits_NV.stride(0)
    _measure_kernel[(rows, blocks)](
        logits_NV, temperature_N, peaks, sums, places, size, stride, blocks, BLOCK=_BLOCK, num_warps=8
    )
    _pick_kernel[(rows,)](
        logits_NV, temperature_N, noise_N, peaks, sums, places, tokens, logprobs, size, stride, blocks,
        BLOCKS=triton.next_power_of_2(blocks), BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return tokens, logprobs
