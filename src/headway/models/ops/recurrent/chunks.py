"""Samples cut into chunks: matrix products within chunks, a state between them. Linear recurrences compute so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.models.ops.registry import in_triton

_SHORT, _LONG = 16, 64
"""Tokens of a chunk, for samples that would not fill a long one and for others; the last chunk is padded."""
_WIDEST = 256
"""Size of a head up to which kernels compute its chunks."""

Recur = Callable[["SampleChunks", Tensor], tuple[Tensor, Tensor]]
"""From chunks and their samples' states to outputs (chunks, chunk size, …) and the states after them."""


@dataclass(frozen=True, eq=False)
class SampleChunks:
    """Chunks of one size, of some samples: the first chunk of each, then the second of each that has one, and so on.

    `samples` (S,) are these, most chunks first; `counts[i]` of them have a chunk number i. `tokens` (N, size)
    are the tokens of each chunk; where a sample has no more, `real` is False and its last token stands in. `real` is
    None where nothing is padded.
    """

    size: int
    samples: Tensor
    counts: list[int]
    tokens: Tensor
    real: Tensor | None

    def gather(self, x: Tensor) -> Tensor:
        """(T, H, …) as (N, H, size, …)."""
        picked = x.index_select(0, self.tokens.flatten()).view(*self.tokens.shape, *x.shape[1:])
        return picked.transpose(1, 2).contiguous()

    def gather_real(self, x_TH: Tensor) -> Tensor:
        """(N, H, size), with zeros for padding."""
        picked = self.gather(x_TH)
        return picked if self.real is None else picked * self.real.unsqueeze(1)

    @cached_property
    def exists(self) -> Tensor:
        """(N, size): `real`, whether anything is padded or not."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.real is None else self.real

    @cached_property
    def walks(self) -> tuple[Tensor, Tensor]:
        """For who walks along samples: the first chunk of each number, and the chunks of each sample. Chunk `number` of
        sample s is `first[number] + s`."""
        counts = np.array(self.counts)
        lengths = (counts[None, :] > np.arange(counts[0])[:, None]).sum(1)
        return self._sent(np.cumsum(counts) - counts), self._sent(lengths)

    def _sent(self, numbers: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(numbers).to(self.tokens.device)


@dataclass(frozen=True, eq=False)
class ChunkedSamples:
    """All samples of a pass, in groups by chunk size. `tokens` (T,) and `samples` (S,) are where each of them is in the
    groups' results, end to end."""

    groups: list[SampleChunks]
    tokens: Tensor
    samples: Tensor

    def run(self, initial: Tensor, recur: Recur) -> tuple[Tensor, Tensor]:
        """Outputs (T, …) and final states (S, …) of a recurrence over all groups."""
        outs, finals = zip(*(recur(group, initial[group.samples]) for group in self.groups), strict=True)
        flat = [out.flatten(0, 1) for out in outs]
        return torch.cat(flat)[self.tokens], torch.cat(finals)[self.samples]


def cut_samples(lengths: Sequence[int], device: torch.device) -> ChunkedSamples:
    """Cut samples of these lengths, end to end, into chunks. Samples of one token are chunks of that size."""
    return _cut(tuple(lengths), device)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _cut(lengths: tuple[int, ...], device: torch.device) -> ChunkedSamples:
    """All layers of a pass ask for the same."""
    sizes = np.array(lengths, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    kinds = np.where(sizes == 1, 1, np.where(sizes < _LONG, _SHORT, _LONG))
    tokens, samples = np.empty(sizes.sum(), dtype=np.int64), np.empty(len(sizes), dtype=np.int64)
    groups, slots, seen = [], 0, 0
    for size in np.unique(kinds).tolist():
        members = np.flatnonzero(kinds == size)
        chunks = -(-sizes[members] // size)
        order = np.argsort(-chunks, kind="stable")
        members, chunks = members[order], chunks[order]
        counts = [int((chunks > number).sum()) for number in range(int(chunks[0]))]
        rank = np.concatenate([np.arange(count) for count in counts])
        number = np.repeat(np.arange(len(counts)), counts)
        within = (number * size)[:, None] + np.arange(size)
        ends = sizes[members][rank][:, None]
        at = starts[members][rank][:, None] + np.minimum(within, ends - 1)
        real = within < ends
        tokens[at[real]] = slots + np.flatnonzero(real)
        samples[members] = seen + np.arange(len(members))
        groups.append(
            SampleChunks(
                size,
                torch.from_numpy(members).to(device),
                counts,
                torch.from_numpy(at).to(device),
                None if real.all() else torch.from_numpy(real).to(device),
            )
        )
        slots += at.size
        seen += len(members)
    return ChunkedSamples(groups, torch.from_numpy(tokens).to(device), torch.from_numpy(samples).to(device))


def precision(x: Tensor) -> torch.dtype:
    """The precision that a recurrence behind projections like `x` computes in: the next higher one. Norms behind it
    magnify its rounding, and chunks round otherwise than tokens one by one."""
    return torch.float64 if x.dtype is torch.float32 else torch.float32


def pairwise_decay(cumulated_NHC: Tensor) -> Tensor:
    """exp of the decay from each later to each earlier token of a chunk, 0 above the diagonal: (N, H, C, C)."""
    size = cumulated_NHC.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=cumulated_NHC.device).triu(1)
    # Masked before exp: above the diagonal it would overflow.
    return (cumulated_NHC.unsqueeze(-1) - cumulated_NHC.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()


def per_head(x_NG: Tensor, each: int) -> Tensor:
    """Repeat what a group of heads shares for each of them."""
    return x_NG if each == 1 else x_NG.repeat_interleave(each, dim=1)


def in_triton_chunks(x: Tensor, heads: int, *sizes: int) -> bool:
    """Tell if the kernels for chunks take tokens like `x` (T, …) of that many heads, whose parts have these sizes."""
    fits = (
        max(sizes) <= _WIDEST and len(x) * heads * max(sizes) < 2**31
    )  # numbers of a pass, which they count in 32 bits
    return fits and x.dtype is torch.float32 and in_triton(x)
