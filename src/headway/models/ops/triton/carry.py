"""States that go from chunk to chunk: a program walks along a sample with some columns of a head's state.

The backward pass walks back with the gradient of the state. Both leave the state, or its gradient, after every step;
the gradients of what is multiplied with states are products over all chunks then.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.recurrent.chunks import SampleChunks

_COLUMNS = 32
"""Of a state, that a program has."""
_NUMBERS = 2048
"""Of a state that nothing is multiplied with, likewise."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _add_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    added, kept, initial, passed, final, firsts, lengths, heads, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """Add what every chunk adds to the state; `passed` gets the state before that. `BACK`: from the last chunk on, and
    `passed` gets it before it is scaled, too: that is the gradient of what was added."""
    sample, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    real = at < SIZE
    own = (sample * heads + head) * SIZE + at
    state = tl.load(initial + own, mask=real, other=0.0)
    length = tl.load(lengths + sample)
    for step in range(length):
        number = length - 1 - step if BACK else step
        chunk = (tl.load(firsts + number) + sample) * heads + head
        place = chunk * SIZE + at
        tl.store(passed + place, state, mask=real)
        state = state * tl.load(kept + chunk) + tl.load(added + place, mask=real, other=0.0)
    tl.store(final + own, state, mask=real)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _columns(d, t, DIM: tl.constexpr, VALUES: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The columns of this program: where they are in a state and in a chunk's values, and which of them are real."""
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    real = (c < VALUES)[None, :]
    return d[:, None] * VALUES + c[None, :], (d < DIM)[:, None] & real, t[:, None] * VALUES + c[None, :], real


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _correct_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    values, answers, keys, kept, initial, corrections, before, final, firsts, lengths, heads, DIM: tl.constexpr,
    VALUES: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sample, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, t = tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    of_state, in_state, of_values, in_values = _columns(d, t, DIM, VALUES, COLUMNS)
    own = (sample * heads + head) * DIM * VALUES
    state = tl.load(initial + own + of_state, mask=in_state, other=0.0)
    for number in range(tl.load(lengths + sample)):
        chunk = (tl.load(firsts + number) + sample) * heads + head
        tl.store(before + chunk * DIM * VALUES + of_state, state, mask=in_state)
        asked = answers + chunk * CHUNK * DIM + t[:, None] * DIM + d[None, :]
        answer = tl.dot(tl.load(asked, mask=(d < DIM)[None, :], other=0.0), state, input_precision="tf32x3")
        correction = tl.load(values + chunk * CHUNK * VALUES + of_values, mask=in_values, other=0.0) - answer
        tl.store(corrections + chunk * CHUNK * VALUES + of_values, correction, mask=in_values)
        key = tl.load(keys + chunk * CHUNK * DIM + t[None, :] * DIM + d[:, None], mask=(d < DIM)[:, None], other=0.0)
        state = tl.dot(key, correction, state * tl.load(kept + chunk), input_precision="tf32x3")
    tl.store(final + own + of_state, state, mask=in_state)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _correct_back_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    d_corrections, d_before, d_final, answers, keys, kept, d_values, d_after, d_initial, firsts, lengths, heads,
    DIM: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sample, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, t = tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    of_state, in_state, of_values, in_values = _columns(d, t, DIM, VALUES, COLUMNS)
    own = (sample * heads + head) * DIM * VALUES
    grad = tl.load(d_final + own + of_state, mask=in_state, other=0.0)
    length = tl.load(lengths + sample)
    for step in range(length):
        chunk = (tl.load(firsts + length - 1 - step) + sample) * heads + head
        tl.store(d_after + chunk * DIM * VALUES + of_state, grad, mask=in_state)
        key = keys + chunk * CHUNK * DIM + t[:, None] * DIM + d[None, :]
        d_value = tl.load(d_corrections + chunk * CHUNK * VALUES + of_values, mask=in_values, other=0.0)
        d_value = tl.dot(tl.load(key, mask=(d < DIM)[None, :], other=0.0), grad, d_value, input_precision="tf32x3")
        tl.store(d_values + chunk * CHUNK * VALUES + of_values, d_value, mask=in_values)
        asked = answers + chunk * CHUNK * DIM + t[None, :] * DIM + d[:, None]
        taken = tl.dot(tl.load(asked, mask=(d < DIM)[:, None], other=0.0), d_value, input_precision="tf32x3")
        grad = grad * tl.load(kept + chunk) - taken
        grad += tl.load(d_before + chunk * DIM * VALUES + of_state, mask=in_state, other=0.0)
    tl.store(d_initial + own + of_state, grad, mask=in_state)


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chunks: SampleChunks, written: Tensor, kept: Tensor, initial: Tensor
    ) -> tuple[Tensor, Tensor]:
        before, final = _add(written.contiguous(), kept.contiguous(), initial.contiguous(), chunks, back=False)
        ctx.chunks = chunks
        ctx.save_for_backward(kept, before)
        return before, final

    @staticmethod
    def backward(ctx: Any, d_before: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        kept, before = ctx.saved_tensors
        chunks = ctx.chunks
        d_written, d_initial = _add(d_before.contiguous(), kept.contiguous(), d_final.contiguous(), chunks, back=True)
        return None, d_written, (d_written * before).sum((-1, -2)), d_initial


class _CarryCorrected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunks: SampleChunks, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, answers, keys, kept, initial = (x.contiguous() for x in inputs)
        corrections, before, final = torch.empty_like(values), _states(values, initial), torch.empty_like(initial)
        grid, tile = _tiles(values, initial)
        _correct_kernel[grid](
            values, answers, keys, kept, initial, corrections, before, final, *chunks.walks, values.shape[1],
            **tile, num_warps=4,
        )  # fmt: skip
        ctx.chunks = chunks
        ctx.save_for_backward(answers, keys, kept, corrections, before)
        return corrections, before, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        answers, keys, kept, corrections, before = ctx.saved_tensors
        d_corrections, d_before, d_final = (grad.contiguous() for grad in grads)
        d_values, d_after = torch.empty_like(d_corrections), torch.empty_like(before)
        d_initial = torch.empty_like(d_final)
        grid, tile = _tiles(corrections, d_final)
        _correct_back_kernel[grid](
            d_corrections, d_before, d_final, answers, keys, kept, d_values, d_after, d_initial, *ctx.chunks.walks,
            corrections.shape[1], **tile, num_warps=4,
        )  # fmt: skip
        d_answers = -(d_values @ before.mT)
        d_keys = corrections @ d_after.mT
        return None, d_values, d_answers, d_keys, (d_after * before).sum((-1, -2)), d_initial


def carry_states(
    written_NHDV: Tensor, kept_NH: Tensor, initial_SHDV: Tensor, chunks: SampleChunks
) -> tuple[Tensor, Tensor]:
    before, final = _Carry.apply(chunks, written_NHDV, kept_NH, initial_SHDV)  # type: ignore[no-untyped-call]  # torch has no types here
    return before, final


def carry_corrected_states(
    values_NHCV: Tensor,
    answers_NHCD: Tensor,
    keys_NHCD: Tensor,
    kept_NH: Tensor,
    initial_SHDV: Tensor,
    chunks: SampleChunks,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = values_NHCV, answers_NHCD, keys_NHCD, kept_NH, initial_SHDV
    corrections, before, final = _CarryCorrected.apply(chunks, *inputs)  # type: ignore[no-untyped-call]  # torch has no types here
    return corrections, before, final


def _add(
    added_NHDV: Tensor, kept_NH: Tensor, initial_SHDV: Tensor, chunks: SampleChunks, *, back: bool
) -> tuple[Tensor, Tensor]:
    samples, heads, dim, values = initial_SHDV.shape
    passed, final = torch.empty_like(added_NHDV), torch.empty_like(initial_SHDV)
    size = dim * values
    block = min(_NUMBERS, triton.next_power_of_2(size))
    _add_kernel[samples, heads, triton.cdiv(size, block)](
        added_NHDV, kept_NH, initial_SHDV, passed, final, *chunks.walks, heads, SIZE=size, BLOCK=block, BACK=back
    )  # fmt: skip
    return passed, final


def _states(values_NHCV: Tensor, initial_SHDV: Tensor) -> Tensor:
    """Room for a state of each chunk."""
    return torch.empty((len(values_NHCV), *initial_SHDV.shape[1:]), dtype=torch.float32, device=values_NHCV.device)


def _tiles(values_NHCV: Tensor, initial_SHDV: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    samples, heads, dim, values = initial_SHDV.shape
    columns = max(16, min(_COLUMNS, triton.next_power_of_2(values)))
    width = max(16, triton.next_power_of_2(dim))
    tile = {"DIM": dim, "VALUES": values, "CHUNK": values_NHCV.shape[2], "WIDTH": width, "COLUMNS": columns}
    return (samples, heads, triton.cdiv(values, columns)), tile
