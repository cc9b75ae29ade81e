"""An arena: one rank's shards of one version, packed end to end into slabs of flat memory."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from headway.transport.weights.fingerprint import Fingerprint
from headway.transport.weights.layout import Layout, Part, RankParts, torch_dtype
from headway.transport.weights.shards import Shard

SLAB_BYTES = 64 << 20
_ALIGN = 64

Allocate = Callable[[int, int], Tensor]
"""Makes slab number n of a size in bytes: a flat uint8 tensor."""


class Arena:
    """Filled again and again with versions of the same tensors, whose slabs are then reused.

    Sizes needn't be known ahead: a slab is added when the next shard doesn't fit, as large as that shard demands.
    """

    def __init__(self, allocate: Allocate, slab_bytes: int = SLAB_BYTES) -> None:
        self.slabs: list[Tensor] = []
        self._allocate = allocate
        self._slab_bytes = slab_bytes
        self._places: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def fill(self, shards: Iterable[Shard], rank: int) -> RankParts:
        """Copy the shards in, fingerprinting them on the device they come from while they pass."""
        fingerprint, parts = Fingerprint(), dict[str, Part]()
        used = [0]
        for shard in shards:
            tensor, dtype = shard.tensor, shard.dtype
            count = tensor.numel()
            piece, position = self._room(used, count * dtype.itemsize)
            place = self._place(piece, position, count, dtype)
            fingerprint.add(shard.name, tensor, shard.offset, shard.shape, dtype, copy=place)
            used[piece] = position + count * dtype.itemsize
            parts[shard.name] = Part(rank, piece, position, shard.offset, count)
        return RankParts(fingerprint.parts(), parts, used if parts else [])

    def mirror(self, other: "Arena", sizes: list[int]) -> None:
        """Take over what `other`'s last `fill` put in its slabs, of which `sizes` bytes are in use."""
        for piece, size in enumerate(sizes):
            if piece == len(self.slabs):
                self.slabs.append(self._allocate(piece, max(size, self._slab_bytes)))
            elif self.slabs[piece].numel() < size:
                self._replace(piece, size)
            self.slabs[piece][:size].copy_(other.slabs[piece][:size], non_blocking=True)

    def shards(self, layout: Layout, rank: int) -> Iterator[Shard]:
        """What the last `fill` put here, as views."""
        for name, parts in layout.parts.items():
            whole = layout.sums[name]
            dtype = torch_dtype(whole.dtype)
            for part in parts:
                if part.rank == rank:
                    place = self._place(part.piece, part.position, part.count, dtype)
                    yield Shard(name, place, part.offset, whole.shape)

    def _room(self, used: list[int], size: int) -> tuple[int, int]:
        """The slab and the position for `size` more bytes."""
        piece = len(used) - 1
        position = -(-used[piece] // _ALIGN) * _ALIGN
        if piece < len(self.slabs) and position + size > self.slabs[piece].numel() and used[piece]:
            used.append(0)
            piece, position = piece + 1, 0
        if piece == len(self.slabs):
            self.slabs.append(self._allocate(piece, max(size, self._slab_bytes)))
        elif position + size > self.slabs[piece].numel():
            self._replace(piece, size)
        return piece, position

    def clear(self) -> None:
        """Let go of all memory."""
        self._places.clear()
        self.slabs.clear()

    def _replace(self, piece: int, size: int) -> None:
        self._places.clear()
        self.slabs[piece] = self._allocate(piece, size)

    def _place(self, piece: int, position: int, count: int, dtype: torch.dtype) -> Tensor:
        """Elements in a slab. They are the same in every version, so views are kept: it takes long to make them."""
        key = (piece, position, count, dtype)
        place = self._places.get(key)
        if place is None:
            raw = self.slabs[piece][position : position + count * dtype.itemsize]
            place = self._places[key] = raw.view(dtype)
        return place
