"""States that go from chunk to chunk of a sample: the part of a linear recurrence that is one chunk after the other.

Chunks are numbered as in `SampleChunks`. On CUDA a kernel walks along a sample, in which the states stay on the chip;
the reference starts a few operations for every chunk, and as many again for its gradients.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from headway.models.ops.recurrent.chunks import SampleChunks, cut_samples
from headway.models.ops.registry import Op, in_triton

logger = logging.getLogger(__name__)

_LARGEST = 128
"""Size of a key up to which the kernel of corrected states has all of it at once."""
_CLOSE = 1e-4
"""How far the kernels' results may be from the reference's, as a part of these."""


@Op
def carry_states(
    written_NHDV: Tensor, kept_NH: Tensor, initial_SHDV: Tensor, chunks: SampleChunks
) -> tuple[Tensor, Tensor]:
    """Run S' = kept S + written over the chunks of each sample. Returns the states before each chunk (N, H, D, V), and
    after each sample (S, H, D, V)."""
    kept = kept_NH[..., None, None]
    return _carry(chunks, initial_SHDV, lambda at, state: kept[at] * state + written_NHDV[at])


@Op
def carry_corrected_states(
    values_NHCV: Tensor,
    answers_NHCD: Tensor,
    keys_NHDC: Tensor,
    kept_NH: Tensor,
    initial_SHDV: Tensor,
    chunks: SampleChunks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run S' = kept S + keys (values - answers S) over the chunks of each sample. Returns values - answers S, the
    states before each chunk, and those after each sample."""
    kept = kept_NH[..., None, None]
    corrections: list[Tensor] = []

    def update(at: slice, state: Tensor) -> Tensor:
        corrections.append(values_NHCV[at] - answers_NHCD[at] @ state)
        return kept[at] * state + keys_NHDC[at] @ corrections[-1]

    before, final = _carry(chunks, initial_SHDV, update)
    return torch.cat(corrections), before, final


def _carry(chunks: SampleChunks, initial: Tensor, update: Callable[[slice, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Hand states from chunk to chunk, many samples at a time. `update` gets chunks and the states before them, and
    returns the states after them."""
    state, first = initial, 0
    before: list[Tensor] = []
    ended: list[Tensor] = []
    for count in chunks.counts:
        if count < len(state):
            ended.append(state[count:])
            state = state[:count]
        before.append(state)
        state = update(slice(first, first + count), state)
        first += count
    ended.append(state)
    return torch.cat(before), torch.cat(ended[::-1])


def _in_kernel(op: Op[..., Any], x: Tensor, initial_SHDV: Tensor) -> bool:
    fits = x.dtype is torch.float32 and in_triton(x)
    return fits and _is_right(op, x.device, *initial_SHDV.shape[2:])


carry_states.backend(
    "triton", takes=lambda written, kept, initial, chunks: _in_kernel(carry_states, written, initial), trains=True
)("headway.models.ops.triton.carry:carry_states")
carry_corrected_states.backend(
    "triton",
    takes=lambda values, answers, keys, kept, initial, chunks: (
        keys.shape[2] <= _LARGEST and _in_kernel(carry_corrected_states, values, initial)
    ),
    trains=True,
)("headway.models.ops.triton.carry:carry_corrected_states")


@cache
@torch.inference_mode(False)
@torch.enable_grad()
def _is_right(op: Op[..., Any], device: torch.device, size: int, width: int) -> bool:
    """Try a kernel on samples of several lengths, in chunks of every size, for states of this size. Where it fails or
    is off on this device, the log says so."""
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    try:
        for chunks in cut_samples((200, 20, 64, 130, 40), device).groups:
            inputs = _drawn(op, chunks, size, width, draw)
            found, expected = (_with_gradients(run, inputs, chunks) for run in (op.backends[0].run, op.reference))
            if not all(map(_close, found, expected)):
                logger.warning("recurrences go from chunk to chunk by slower operations: a kernel is off here")
                return False
    except Exception as error:  # of whatever kind: it is the compiler's or the device's
        logger.warning("recurrences go from chunk to chunk by slower operations: a kernel fails here: %s", error)
        return False
    return True


def _drawn(
    op: Op[..., Any], chunks: SampleChunks, size: int, width: int, draw: Callable[..., Tensor], heads: int = 2
) -> list[Tensor]:
    """Inputs of `op` for these chunks."""
    count, tokens = sum(chunks.counts), chunks.size
    shapes = ((count, heads, tokens, width), (count, heads, tokens, size), (count, heads, size, tokens))
    values, answers, keys = (0.05 * draw(shape) for shape in shapes)
    own = [values, answers, keys] if op is carry_corrected_states else [keys @ values]
    return [*own, draw(count, heads).sigmoid(), draw(chunks.counts[0], heads, size, width)]


def _with_gradients(run: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], chunks: SampleChunks) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = run(*leaves, chunks)
    return [*outs, *torch.autograd.grad(outs, leaves, [out.detach().cos() for out in outs])]


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= _CLOSE * b.norm())
