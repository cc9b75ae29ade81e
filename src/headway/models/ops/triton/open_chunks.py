"""Chunks of the gated delta rule: the system of a chunk is inverted where it is made, and multiplied with both right
sides."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.recurrent.chunks import SampleChunks
from headway.models.ops.triton.chunk_tiles import (
    TILE,
    decay_within,
    load_rows,
    load_turned,
    of_program,
    products,
    summed,
)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _inverse(system, blocks, t, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    """Invert 1 + L, L being what a system has below its diagonal. The blocks on the diagonal, 1 + D, are inverted row
    by row, all at once, by way of the memory `blocks`. With M = (1 + D)⁻¹ (L - D), whose fourth power is 0, the whole
    is (1 - M) (1 + M²) (1 + D)⁻¹."""
    BLOCK: tl.constexpr = 16
    b, r = tl.arange(0, CHUNK // BLOCK), tl.arange(0, BLOCK)
    corner = b * (CHUNK + 1) * BLOCK
    inner = tl.zeros((CHUNK // BLOCK, BLOCK, BLOCK), tl.float32) + tl.where(r[:, None] == r[None, :], 1.0, 0.0)[None]
    for row in range(1, BLOCK):
        weights = tl.load(system + corner[:, None] + row * CHUNK + r[None, :], mask=(r < row)[None, :], other=0.0)
        taken = tl.sum(weights[:, :, None] * inner, 1)
        inner = tl.where((r == row)[None, :, None], inner - taken[:, None, :], inner)
    tl.store(blocks + corner[:, None, None] + r[None, :, None] * CHUNK + r[None, None, :], inner)
    tl.debug_barrier()
    square = t[:, None] * CHUNK + t[None, :]
    same = t[:, None] // BLOCK == t[None, :] // BLOCK
    found = tl.load(blocks + square, mask=same, other=0.0)
    tl.debug_barrier()
    if CHUNK > BLOCK:
        below = tl.load(system + square, mask=t[:, None] // BLOCK > t[None, :] // BLOCK, other=0.0)
        rest = tl.dot(found, below, input_precision="tf32x3")
        found = tl.dot(tl.dot(rest, rest, input_precision="tf32x3"), found, found, input_precision="tf32x3")
        found -= tl.dot(rest, found, input_precision="tf32x3")
    return found


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _open_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    k, v, totals, betas, tokens, systems, inverses, values, answers, keys, heads, each, DIM: tl.constexpr,
    VALUES: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, head, _, t, token = of_program(tokens, heads, CHUNK)
    total, beta = tl.load(totals + at * CHUNK + t), tl.load(betas + at * CHUNK + t)
    systems, inverses = systems + at * CHUNK * CHUNK, inverses + at * CHUNK * CHUNK
    values, answers, keys = values + at * CHUNK * VALUES, answers + at * CHUNK * DIM, keys + at * CHUNK * DIM
    shared, own = (token * (heads // each) + head // each) * DIM, (token * heads + head) * VALUES
    square = t[:, None] * CHUNK + t[None, :]
    alike = products(k, k, shared, DIM, CHUNK, COLUMNS)
    tl.store(systems + square, beta[:, None] * alike * decay_within(total, t))
    tl.debug_barrier()
    inverse = _inverse(systems, inverses, t, CHUNK)
    tl.store(inverses + square, inverse)
    for start in range(0, VALUES, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        found = tl.dot(inverse, beta[:, None] * load_rows(v, own, c, VALUES), input_precision="tf32x3")
        tl.store(values + t[:, None] * VALUES + c[None, :], found, mask=(c < VALUES)[None, :])
    since = beta * tl.exp(total)
    left = tl.exp(tl.load(totals + at * CHUNK + CHUNK - 1) - total)
    for start in range(0, DIM, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        x, place = load_rows(k, shared, c, DIM), t[:, None] * DIM + c[None, :]
        found = tl.dot(inverse, since[:, None] * x, input_precision="tf32x3")
        tl.store(answers + place, found, mask=(c < DIM)[None, :])
        tl.store(keys + place, left[:, None] * x, mask=(c < DIM)[None, :])


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _open_back_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    k, v, totals, betas, tokens, reals, inverses, values, answers, d_values, d_answers, d_keys, d_k, d_v, d_totals,
    d_betas, heads, each, DIM: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, head, begin, t, token = of_program(tokens, heads, CHUNK)
    total, beta = tl.load(totals + at * CHUNK + t), tl.load(betas + at * CHUNK + t)
    exists = (tl.load(reals + begin + t) != 0)[:, None]
    values, d_values = values + at * CHUNK * VALUES, d_values + at * CHUNK * VALUES
    answers, d_answers, d_keys = answers + at * CHUNK * DIM, d_answers + at * CHUNK * DIM, d_keys + at * CHUNK * DIM
    shared, own = (token * (heads // each) + head // each) * DIM, token * heads + head
    turned = tl.load(inverses + at * CHUNK * CHUNK + t[None, :] * CHUNK + t[:, None])
    taken = tl.zeros((CHUNK, CHUNK), tl.float32)
    d_beta = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, VALUES, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        d_right = tl.dot(turned, load_rows(d_values, t * VALUES, c, VALUES), input_precision="tf32x3")
        taken = tl.dot(d_right, load_turned(values, t * VALUES, c, VALUES), taken, input_precision="tf32x3")
        d_beta += tl.sum(d_right * load_rows(v, own * VALUES, c, VALUES), 1)
        place = (own * VALUES)[:, None] + c[None, :]
        tl.store(d_v + place, beta[:, None] * d_right, mask=(c < VALUES)[None, :] & exists)
    for start in range(0, DIM, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        d_right = tl.dot(turned, load_rows(d_answers, t * DIM, c, DIM), input_precision="tf32x3")
        taken = tl.dot(d_right, load_turned(answers, t * DIM, c, DIM), taken, input_precision="tf32x3")
    d_alike = tl.where(t[:, None] > t[None, :], -taken, 0.0) * decay_within(total, t)
    scaled = d_alike * products(k, k, shared, DIM, CHUNK, COLUMNS)
    d_beta += tl.sum(scaled, 1)
    scaled = beta[:, None] * scaled
    d_total = tl.sum(scaled, 1) - tl.sum(scaled, 0)
    d_alike = beta[:, None] * d_alike
    d_alike += tl.trans(d_alike)
    since = tl.exp(total)
    left = tl.exp(tl.load(totals + at * CHUNK + CHUNK - 1) - total)
    decayed = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, DIM, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        x = load_rows(k, shared, c, DIM)
        d_right = tl.dot(turned, load_rows(d_answers, t * DIM, c, DIM), input_precision="tf32x3")
        read = tl.sum(d_right * x, 1) * since
        d_beta += read
        d_total += beta * read
        d_left = left[:, None] * load_rows(d_keys, t * DIM, c, DIM)
        decayed += tl.sum(d_left * x, 1)
        d_x = tl.dot(d_alike, x, (beta * since)[:, None] * d_right + d_left, input_precision="tf32x3")
        tl.store(d_k + (own * DIM)[:, None] + c[None, :], d_x, mask=(c < DIM)[None, :] & exists)
    d_total += tl.where(t == CHUNK - 1, tl.sum(decayed, 0), 0.0) - decayed
    tl.store(d_totals + at * CHUNK + t, d_total)
    tl.store(d_betas + at * CHUNK + t, d_beta)


class _OpenChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunks: SampleChunks, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v, total, beta = (x.contiguous() for x in inputs)
        count, heads, size = total.shape
        systems, inverses = total.new_empty(2, count, heads, size, size)
        values, answers, keys = (total.new_empty(*total.shape, width) for width in (v.shape[2], *2 * k.shape[2:]))
        _open_kernel[(count * heads,)](
            k, v, total, beta, chunks.tokens, systems, inverses, values, answers, keys, heads, heads // k.shape[1],
            DIM=k.shape[2], VALUES=v.shape[2], CHUNK=size, **TILE,
        )  # fmt: skip
        ctx.chunks = chunks
        ctx.save_for_backward(k, v, total, beta, inverses, values, answers)
        return values, answers, keys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k, v, total, beta, inverses, values, answers = ctx.saved_tensors
        (count, heads, size), shared = total.shape, k.shape[1]
        d_total, d_beta = (torch.empty_like(x) for x in (total, beta))
        # Tokens that are not in these chunks have none.
        d_v, d_k = torch.zeros_like(v), k.new_zeros(len(k), heads, k.shape[2])
        _open_back_kernel[(count * heads,)](
            k, v, total, beta, ctx.chunks.tokens, ctx.chunks.exists, inverses, values, answers,
            *(grad.contiguous() for grad in grads), d_k, d_v, d_total, d_beta, heads, heads // shared,
            DIM=k.shape[2], VALUES=v.shape[2], CHUNK=size, **TILE,
        )  # fmt: skip
        return None, summed(d_k, shared), d_v, d_total, d_beta


def open_chunks(
    k_TKD: Tensor, v_THV: Tensor, total_NHC: Tensor, beta_NHC: Tensor, chunks: SampleChunks
) -> tuple[Tensor, Tensor, Tensor]:
    values, answers, keys = _OpenChunks.apply(chunks, k_TKD, v_THV, total_NHC, beta_NHC)  # type: ignore[no-untyped-call]  # torch has no types here
    return values, answers, keys
