"""States that go from chunk to chunk of a sample: the part of a linear recurrence that is one chunk after the other.

Chunks are numbered as in `SampleChunks`. On CUDA a kernel walks along a sample, in which the states stay on the chip;
the reference starts a few operations for every chunk, and as many again for its gradients.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headway.models.ops.recurrent.chunks import SampleChunks
from headway.models.ops.registry import Op, in_triton

_LARGEST = 128
"""Size of a key up to which the kernel of corrected states has all of it at once."""


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
    keys_NHCD: Tensor,
    kept_NH: Tensor,
    initial_SHDV: Tensor,
    chunks: SampleChunks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run S' = kept S + keysᵀ (values - answers S) over the chunks of each sample. Returns values - answers S, the
    states before each chunk, and those after each sample."""
    kept = kept_NH[..., None, None]
    corrections: list[Tensor] = []

    def update(at: slice, state: Tensor) -> Tensor:
        corrections.append(values_NHCV[at] - answers_NHCD[at] @ state)
        return kept[at] * state + keys_NHCD[at].mT @ corrections[-1]

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


def _in_kernel(x: Tensor) -> bool:
    return x.dtype is torch.float32 and in_triton(x)


carry_states.backend("triton", takes=lambda written, *_: _in_kernel(written), trains=True)(
    "headway.models.ops.triton.carry:carry_states"
)
carry_corrected_states.backend(
    "triton",
    takes=lambda values, answers, keys, *_: keys.shape[3] <= _LARGEST and _in_kernel(values),
    trains=True,
)("headway.models.ops.triton.carry:carry_corrected_states")
