"""An arena: one rank's shards of one version, packed end to end into slabs of flat memory."""

from collections.abc import Callable, Iterable, Iterator

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

    def fill(self, shards: Iterable[Shard], rank: int) -> RankParts:
        """Copy the shards in, fingerprinting them on the device they come from while they pass."""
        fingerprint, parts = Fingerprint(), dict[str, Part]()
        used = [0]
        for shard in shards:
            size = shard.tensor.nbytes
            piece, position = self._room(used, size)
            place = self.slabs[piece][position : position + size]
            fingerprint.add(shard.name, shard.tensor, shard.offset, shard.shape, copy=place)
            used[piece] = position + size
            parts[shard.name] = Part(rank, piece, position, shard.offset, shard.tensor.numel())
        return RankParts(fingerprint.parts(), parts, used if parts else [])

    def mirror(self, other: "Arena", sizes: list[int]) -> None:
        """Take over what `other`'s last `fill` put in its slabs, of which `sizes` bytes are in use."""
        for piece, size in enumerate(sizes):
            if piece == len(self.slabs):
                self.slabs.append(self._allocate(piece, max(size, self._slab_bytes)))
            elif len(self.slabs[piece]) < size:
                self.slabs[piece] = self._allocate(piece, size)
            self.slabs[piece][:size].copy_(other.slabs[piece][:size], non_blocking=True)

    def shards(self, layout: Layout, rank: int) -> Iterator[Shard]:
        """What the last `fill` put here, as views."""
        for name, parts in layout.parts.items():
            whole = layout.sums[name]
            dtype = torch_dtype(whole.dtype)
            for part in parts:
                if part.rank == rank:
                    raw = self.slabs[part.piece][part.position : part.position + part.count * dtype.itemsize]
                    yield Shard(name, raw.view(dtype), part.offset, whole.shape)

    def _room(self, used: list[int], size: int) -> tuple[int, int]:
        """The slab and the position for `size` more bytes."""
        piece = len(used) - 1
        position = -(-used[piece] // _ALIGN) * _ALIGN
        if piece < len(self.slabs) and position + size > len(self.slabs[piece]) and used[piece]:
            used.append(0)
            piece, position = piece + 1, 0
        if piece == len(self.slabs):
            self.slabs.append(self._allocate(piece, max(size, self._slab_bytes)))
        elif position + size > len(self.slabs[piece]):
            self.slabs[piece] = self._allocate(piece, size)
        return piece, position
