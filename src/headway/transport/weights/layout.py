"""Where tensors lie: which parts of which tensors each rank holds, and the fingerprint over all of them."""

from collections.abc import Iterator
from math import prod

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from headway.core.errors import HeadwayError
from headway.transport.weights.fingerprint import Fingerprint, ShardSum, TensorSum


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
    return Layout(fingerprint.hexdigest(), fingerprint.sums(), parts, [theirs.pieces for theirs in everyone])


def torch_dtype(name: str) -> torch.dtype:
    """Raises HeadwayError for what this version of torch doesn't know."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise HeadwayError(f"weights of dtype {name!r} are unknown to this version of torch")
    return dtype


class Assembler:
    """Puts tensors together from parts that arrive in any order, each as raw bytes."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._open: dict[str, tuple[Tensor, int]] = {}
        self._by_piece: dict[tuple[int, int], list[tuple[str, Part]]] = {}
        for name, parts in layout.parts.items():
            if sum(part.count for part in parts) != prod(layout.sums[name].shape):
                raise HeadwayError(f"the parts of {name} do not add up to its shape {layout.sums[name].shape}")
            for part in parts:
                self._by_piece.setdefault((part.rank, part.piece), []).append((name, part))

    def piece(self, rank: int, piece: int, data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Take all parts of one piece (uint8 `data`) and yield the tensors that are complete now.

        A tensor that lies in the piece as a whole is a view of it.
        """
        for name, part in self._by_piece.get((rank, piece), []):
            whole = self._layout.sums[name]
            dtype = torch_dtype(whole.dtype)
            elements = data[part.position : part.position + part.count * dtype.itemsize].view(dtype)
            if part.count == prod(whole.shape):
                yield name, elements.view(whole.shape)
                continue
            tensor, missing = self._open.pop(name, (None, prod(whole.shape)))
            if tensor is None:
                tensor = torch.empty(missing, dtype=dtype)
            tensor[part.offset : part.offset + part.count] = elements
            if missing == part.count:
                yield name, tensor.view(whole.shape)
            else:
                self._open[name] = (tensor, missing - part.count)
