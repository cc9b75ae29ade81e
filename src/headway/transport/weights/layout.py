"""The layout of a version: which parts of which tensors each process holds, and the fingerprint over all of them."""

from collections.abc import Iterator
from functools import cache
from math import prod
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.transport.weights.fingerprint import Fingerprint, ShardSum, TensorSum, digest_of


class Part(msgspec.Struct, frozen=True, array_like=True):
    """`count` elements of a tensor from flat index `offset` on, `position` bytes into piece `piece` (a file, a block of
    memory) of process `rank`."""

    rank: int
    piece: int
    position: int
    offset: int
    count: int


class RankParts(msgspec.Struct):
    """One process's contribution to a layout."""

    sums: dict[str, ShardSum]
    parts: dict[str, Part]
    pieces: list[int]


class Layout(msgspec.Struct):
    """All parts of all tensors; `sums` are the tensors' shares of the fingerprint, `pieces[rank]` the sizes of that
    process's pieces in bytes."""

    fingerprint: str
    sums: dict[str, TensorSum]
    parts: dict[str, list[Part]]
    pieces: list[list[int]]

    @classmethod
    def of(cls, contributions: list[RankParts]) -> "Layout":
        """Join the contributions of all processes. Raises HeadwayError where parts don't make whole tensors."""
        fingerprint, parts = Fingerprint(), dict[str, list[Part]]()
        for contribution in contributions:
            fingerprint.merge(contribution.sums)
            for name, part in contribution.parts.items():
                parts.setdefault(name, []).append(part)
        sums = fingerprint.sums()
        layout = cls(digest_of(sums), sums, parts, [contribution.pieces for contribution in contributions])
        layout.check()
        return layout

    def check(self) -> None:
        """Raise HeadwayError where the parts of a tensor are more or less than the whole."""
        for name, parts in self.parts.items():
            if sum(part.count for part in parts) != prod(self.sums[name].shape):
                raise HeadwayError(f"the parts of {name} do not add up to its shape {self.sums[name].shape}")


class Arrival(NamedTuple):
    """`elements` (flat) of tensor `name` from flat index `offset` on. Where they don't last, their memory is reused as
    soon as the next arrival is asked for."""

    name: str
    offset: int
    elements: Tensor
    lasts: bool = True


class Contents:
    """The parts in each piece of a layout. Raises HeadwayError where parts don't make whole tensors.

    Versions of the same tensors have the same layout, so views are kept: making them takes longer than copying.
    """

    def __init__(self, layout: Layout) -> None:
        layout.check()
        self._parts, self._kinds = layout.parts, _kinds(layout)
        self._views: dict[tuple[int, ...], list[Arrival]] = {}
        self._pieces: dict[tuple[int, int], list[tuple[str, torch.dtype, Part]]] = {}
        for name, parts in layout.parts.items():
            dtype = torch_dtype(layout.sums[name].dtype)
            for part in parts:
                self._pieces.setdefault((part.rank, part.piece), []).append((name, dtype, part))

    def fit(self, layout: Layout) -> bool:
        """Tell if another version has the same layout."""
        return self._parts == layout.parts and self._kinds == _kinds(layout)

    def arrivals(self, rank: int, piece: int, data: Tensor, start: int = 0, *, lasts: bool = True) -> list[Arrival]:
        """View `data`, bytes of a piece from byte `start` on that end where elements end, as parts of tensors."""
        key = (rank, piece, start, data.data_ptr(), len(data), lasts)
        if key not in self._views:
            self._views[key] = list(self._view(rank, piece, data, start, lasts))
        return self._views[key]

    def _view(self, rank: int, piece: int, data: Tensor, start: int, lasts: bool) -> Iterator[Arrival]:
        for name, dtype, part in self._pieces.get((rank, piece), []):
            begin = max(part.position, start)
            end = min(part.position + part.count * dtype.itemsize, start + len(data))
            if begin < end:
                offset = part.offset + (begin - part.position) // dtype.itemsize
                yield Arrival(name, offset, data[begin - start : end - start].view(dtype), lasts)


def _kinds(layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
    return [(whole.dtype, whole.shape) for whole in layout.sums.values()]


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Look up a dtype. Raises HeadwayError where this version of torch doesn't have it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise HeadwayError(f"weights of dtype {name!r} are unknown to this version of torch")
    return dtype
