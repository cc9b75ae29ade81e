"""A buffer: one version in memory that other processes can map, the host's or a GPU's or both."""

from collections.abc import Iterable

import torch
from torch import Tensor

from headway.transport.weights import device_memory, segments
from headway.transport.weights.arena import Arena
from headway.transport.weights.layout import RankParts
from headway.transport.weights.shards import Shard

_FIRST_BYTES, _LAST_BYTES = 16 << 20, 256 << 20
"""Slabs of a GPU's memory grow: adapters take little, and a model has few handles."""


class Buffer:
    """Number `number` of rank `rank`. `handles` are those of slabs on a GPU, `arena` is where the version lies."""

    def __init__(self, prefix: str, number: int, rank: int, slab_bytes: int) -> None:
        self.handles: list[str] = []
        self._prefix, self._number, self._rank = prefix, number, rank
        self._host = Arena(self._segment, slab_bytes)
        self._on_device = Arena(self._device_slab, _FIRST_BYTES)
        self._device = torch.device("cpu")
        self._pinned = False
        self.arena = self._host

    def fill(self, shards: Iterable[Shard], device: torch.device | None, *, pinned: bool) -> RankParts:
        """Put the shards on GPU `device`, or into the host's memory, `pinned` for copies from a GPU."""
        self.arena = self._host if device is None else self._on_device
        self._device = device or self._device
        self._pinned = self._pinned or pinned
        return self.arena.fill(shards, self._rank)

    def copy_to_host(self, sizes: list[int]) -> None:
        """What is on the GPU, of which `sizes` bytes of each slab are in use."""
        self._host.mirror(self._on_device, sizes)
        torch.cuda.synchronize(self._device)

    def clear(self) -> None:
        """Give all memory back."""
        for slab, memory in enumerate(self._host.slabs):
            if self._pinned:
                device_memory.unpin(memory)
            segments.segment(self._prefix, self._number, self._rank, slab).unlink(missing_ok=True)
        self._host.clear()
        self._on_device.clear()
        for handle in self.handles:
            device_memory.release(handle)
        self.handles.clear()
        if self._rank == 0:
            segments.table(self._prefix, self._number).unlink(missing_ok=True)

    def _segment(self, slab: int, size: int) -> Tensor:
        if self._pinned and slab < len(self._host.slabs):
            device_memory.unpin(self._host.slabs[slab])
        memory = segments.create(segments.segment(self._prefix, self._number, self._rank, slab), size)
        if self._pinned:
            device_memory.pin(memory)
        return memory

    def _device_slab(self, slab: int, size: int) -> Tensor:
        if slab < len(self.handles):
            device_memory.release(self.handles.pop(slab))
        memory, handle = device_memory.allocate(max(size, min(_FIRST_BYTES << slab, _LAST_BYTES)), self._device)
        self.handles.insert(slab, handle)
        return memory
