"""Where tensors lie: which parts of which tensors each rank holds, and the fingerprint over all of them."""

from collections.abc import Iterator
from functools import cache
from math import prod
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from headway.core.errors import HeadwayError
from headway.transport.weights.fingerprint import Fingerprint, ShardSum, TensorSum, digest_of


class Part(msgspec.Struct, frozen=True, array_like=True):
    """`count` elements of a tensor from flat index `offset` on. They lie in piece `piece` (a file, a slab) of rank
    `rank`, `position` bytes into it."""

    rank: int
    piece: int
    position: int
    offset: int
    count: int


class Layout(msgspec.Struct):
    """All parts of all tensors, and `sums`, the tensors' shares of the fingerprint. `pieces[r]` are the sizes of
    rank r's pieces in bytes."""

    fingerprint: str
    sums: dict[str, TensorSum]
    parts: dict[str, list[Part]]
    pieces: list[list[int]]

    @property
    def bytes(self) -> int:
        return sum(map(sum, self.pieces))


class RankParts(msgspec.Struct):
    """What one rank contributes to a layout."""

    sums: dict[str, ShardSum]
    parts: dict[str, Part]
    pieces: list[int]


def gather_layout(mine: RankParts, ranks: int) -> Layout:
    """The whole layout, on every rank: names and sums travel, tensors don't."""
    everyone: list[RankParts] = [mine] * ranks
    if ranks > 1:
        dist.all_gather_object(everyone, mine)
    fingerprint, parts = Fingerprint(), dict[str, list[Part]]()
    for theirs in everyone:
        fingerprint.merge_parts(theirs.sums)
        for name, part in theirs.parts.items():
            parts.setdefault(name, []).append(part)
    sums = fingerprint.sums()
    return Layout(digest_of(sums), sums, parts, [theirs.pieces for theirs in everyone])


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Raises HeadwayError for what this version of torch doesn't know."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise HeadwayError(f"weights of dtype {name!r} are unknown to this version of torch")
    return dtype


class Arrival(NamedTuple):
    """`elements` (flat) of tensor `name` from flat index `offset` on. Where they don't last, the memory is used again
    as soon as the next arrival is asked for."""

    name: str
    offset: int
    elements: Tensor
    lasts: bool = True


class Contents:
    """What lies in each piece of a layout. Raises HeadwayError where parts don't make whole tensors.

    Versions of the same tensors lie alike, so what was cut once is kept: it takes longer than to copy it.
    """

    def __init__(self, layout: Layout) -> None:
        self._parts, self._kinds = layout.parts, _kinds(layout)
        self._pieces: dict[tuple[int, int], list[tuple[str, torch.dtype, Part]]] = {}
        self._cut: dict[tuple[int, ...], list[Arrival]] = {}
        for name, parts in layout.parts.items():
            whole = layout.sums[name]
            dtype = torch_dtype(whole.dtype)
            if sum(part.count for part in parts) != prod(whole.shape):
                raise HeadwayError(f"the parts of {name} do not add up to its shape {whole.shape}")
            for part in parts:
                self._pieces.setdefault((part.rank, part.piece), []).append((name, dtype, part))

    def fit(self, layout: Layout) -> bool:
        """Whether another version lies like this."""
        return self._parts == layout.parts and self._kinds == _kinds(layout)

    def arrivals(self, rank: int, piece: int, data: Tensor, start: int = 0, *, lasts: bool = True) -> list[Arrival]:
        """What `data` holds: bytes of a piece from byte `start` on, cut where elements end. Nothing is copied."""
        key = (rank, piece, start, data.data_ptr(), len(data), lasts)
        if key not in self._cut:
            self._cut[key] = list(self._cuts(rank, piece, data, start, lasts))
        return self._cut[key]

    def _cuts(self, rank: int, piece: int, data: Tensor, start: int, lasts: bool) -> Iterator[Arrival]:
        for name, dtype, part in self._pieces.get((rank, piece), []):
            begin = max(part.position, start)
            end = min(part.position + part.count * dtype.itemsize, start + len(data))
            if begin < end:
                offset = part.offset + (begin - part.position) // dtype.itemsize
                yield Arrival(name, offset, data[begin - start : end - start].view(dtype), lasts)


def _kinds(layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
    return [(whole.dtype, whole.shape) for whole in layout.sums.values()]
