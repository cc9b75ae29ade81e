"""Outputs of chunks: what is read of the state before, and of the chunk itself, leaves the chip as one sum."""

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
def _read_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    q, k, totals, before, corrections, tokens, outs, heads, each, DIM: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, head, begin, t, token = of_program(tokens, heads, CHUNK)
    total = tl.load(totals + at * CHUNK + t)
    before, corrections = before + at * DIM * VALUES, corrections + at * CHUNK * VALUES
    outs += (begin * heads + head) * VALUES
    shared = (token * (heads // each) + head // each) * DIM
    read = products(q, k, shared, DIM, CHUNK, COLUMNS) * decay_within(total, t)
    for start in range(0, VALUES, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        out = tl.zeros((CHUNK, COLUMNS), tl.float32)
        for first in range(0, DIM, COLUMNS):
            d = first + tl.arange(0, COLUMNS)
            inside = (d < DIM)[:, None] & (c < VALUES)[None, :]
            state = tl.load(before + d[:, None] * VALUES + c[None, :], mask=inside, other=0.0)
            out = tl.dot(load_rows(q, shared, d, DIM), state, out, input_precision="tf32x3")
        out = tl.exp(total)[:, None] * out
        out = tl.dot(read, load_rows(corrections, t * VALUES, c, VALUES), out, input_precision="tf32x3")
        tl.store(outs + (t * heads * VALUES)[:, None] + c[None, :], out, mask=(c < VALUES)[None, :])


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _read_back_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    q, k, totals, before, corrections, tokens, reals, d_outs, d_q, d_k, d_totals, d_before, d_corrections, heads, each,
    DIM: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, head, begin, t, token = of_program(tokens, heads, CHUNK)
    total = tl.load(totals + at * CHUNK + t)
    exists = (tl.load(reals + begin + t) != 0)[:, None]
    before, d_before = before + at * DIM * VALUES, d_before + at * DIM * VALUES
    corrections, d_corrections = corrections + at * CHUNK * VALUES, d_corrections + at * CHUNK * VALUES
    d_outs += (begin * heads + head) * VALUES
    shared, own = (token * (heads // each) + head // each) * DIM, token * heads + head
    read = products(q, k, shared, DIM, CHUNK, COLUMNS) * decay_within(total, t)
    turned = tl.trans(read)
    d_read = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, VALUES, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        d_out = load_rows(d_outs, t * heads * VALUES, c, VALUES)
        d_read = tl.dot(d_out, load_turned(corrections, t * VALUES, c, VALUES), d_read, input_precision="tf32x3")
        found = tl.dot(turned, d_out, input_precision="tf32x3")
        tl.store(d_corrections + t[:, None] * VALUES + c[None, :], found, mask=(c < VALUES)[None, :])
    scaled = d_read * read
    d_total = tl.sum(scaled, 1) - tl.sum(scaled, 0)
    d_read = d_read * decay_within(total, t)
    turned = tl.trans(d_read)
    since = tl.exp(total)[:, None]
    for first in range(0, DIM, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        d_x = tl.zeros((CHUNK, COLUMNS), tl.float32)
        for start in range(0, VALUES, COLUMNS):
            c = start + tl.arange(0, COLUMNS)
            inside = (d < DIM)[None, :] & (c < VALUES)[:, None]
            state = tl.load(before + d[None, :] * VALUES + c[:, None], mask=inside, other=0.0)
            d_x = tl.dot(load_rows(d_outs, t * heads * VALUES, c, VALUES), state, d_x, input_precision="tf32x3")
        d_x = since * d_x
        x = load_rows(q, shared, d, DIM)
        d_total += tl.sum(d_x * x, 1)
        d_x = tl.dot(d_read, load_rows(k, shared, d, DIM), d_x, input_precision="tf32x3")
        place, inside = (own * DIM)[:, None] + d[None, :], (d < DIM)[None, :] & exists
        tl.store(d_q + place, d_x, mask=inside)
        tl.store(d_k + place, tl.dot(turned, x, input_precision="tf32x3"), mask=inside)
    tl.store(d_totals + at * CHUNK + t, d_total)
    since = tl.exp(total)[None, :]
    for first in range(0, DIM, 2 * COLUMNS):
        d = first + tl.arange(0, 2 * COLUMNS)
        asked = since * load_turned(q, shared, d, DIM)
        for start in range(0, VALUES, COLUMNS):
            c = start + tl.arange(0, COLUMNS)
            found = tl.dot(asked, load_rows(d_outs, t * heads * VALUES, c, VALUES), input_precision="tf32x3")
            inside = (d < DIM)[:, None] & (c < VALUES)[None, :]
            tl.store(d_before + d[:, None] * VALUES + c[None, :], found, mask=inside)


class _ReadChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunks: SampleChunks, *inputs: Tensor) -> Tensor:
        q, k, total, before, corrections = (x.contiguous() for x in inputs)
        (count, heads, size), width = total.shape, before.shape[3]
        outs = total.new_empty(count, size, heads, width)
        _read_kernel[(count * heads,)](
            q, k, total, before, corrections, chunks.tokens, outs, heads, heads // q.shape[1],
            DIM=q.shape[2], VALUES=width, CHUNK=size, **TILE,
        )  # fmt: skip
        ctx.chunks = chunks
        ctx.save_for_backward(q, k, total, before, corrections)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, total, before, corrections = ctx.saved_tensors
        (count, heads, size), shared = total.shape, q.shape[1]
        d_q, d_k = q.new_zeros(2, len(q), heads, q.shape[2])
        d_total, d_before, d_corrections = (torch.empty_like(x) for x in (total, before, corrections))
        _read_back_kernel[(count * heads,)](
            q, k, total, before, corrections, ctx.chunks.tokens, ctx.chunks.exists, grads[0].contiguous(), d_q, d_k,
            d_total, d_before, d_corrections, heads, heads // shared, DIM=q.shape[2], VALUES=before.shape[3],
            CHUNK=size, **TILE,
        )  # fmt: skip
        return None, summed(d_q, shared), summed(d_k, shared), d_total, d_before, d_corrections


def read_chunks(
    q_TKD: Tensor, k_TKD: Tensor, total_NHC: Tensor, before_NHDV: Tensor, corrections_NHCV: Tensor, chunks: SampleChunks
) -> Tensor:
    outs: Tensor = _ReadChunks.apply(chunks, q_TKD, k_TKD, total_NHC, before_NHDV, corrections_NHCV)  # type: ignore[no-untyped-call]  # torch has no types here
    return outs
