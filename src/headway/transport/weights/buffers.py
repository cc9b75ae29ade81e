"""Buffers: one process's shards of a version in memory, shared with other processes or stored until they fetch it."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.transport.weights import device_memory, host_memory
from headway.transport.weights.fingerprint import Fingerprint
from headway.transport.weights.layout import Layout, Part, RankParts, torch_dtype
from headway.transport.weights.shards import Shard

PIECE_BYTES = 64 << 20
_ALIGN = 64
_FIRST_DEVICE_BYTES, _LAST_DEVICE_BYTES = 16 << 20, 256 << 20
"""Pieces of GPU memory grow: an adapter takes little, and a model has few handles."""
_KEEP_LAST = 2

Allocate = Callable[[int, int], Tensor]
"""Makes piece number n of a size in bytes: a flat uint8 tensor."""


class ShardBuffer:
    """Packs shards end to end into pieces of flat memory, which the next versions of the same tensors reuse.

    Sizes need not be known ahead: a piece is added when a shard doesn't fit, at least as large as the shard.
    """

    def __init__(self, allocate: Allocate, piece_bytes: int = PIECE_BYTES) -> None:
        self.pieces: list[Tensor] = []
        self._allocate = allocate
        self._piece_bytes = piece_bytes
        self._views: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def fill(self, shards: Iterable[Shard], rank: int) -> RankParts:
        """Copy the shards in, and fingerprint them on the device they come from in the same pass."""
        fingerprint, parts = Fingerprint(), dict[str, Part]()
        used = [0]
        for shard in shards:
            count, dtype = shard.tensor.numel(), shard.dtype
            piece, position = self._reserve(used, shard.nbytes)
            view = self._view(piece, position, count, dtype)
            fingerprint.add(shard.name, shard.tensor, shard.offset, shard.shape, dtype, copy=view)
            used[piece] = position + shard.nbytes
            parts[shard.name] = Part(rank, piece, position, shard.offset, count)
        return RankParts(fingerprint.shards(), parts, used if parts else [])

    def copy_from(self, other: "ShardBuffer", sizes: list[int]) -> None:
        """Copy what `other` was last filled with: `sizes` bytes of its pieces are in use."""
        for piece, size in enumerate(sizes):
            self._ensure(piece, size)
            self.pieces[piece][:size].copy_(other.pieces[piece][:size], non_blocking=True)

    def shards(self, layout: Layout, rank: int) -> Iterator[Shard]:
        """View what this buffer of process `rank` was last filled with."""
        for name, parts in layout.parts.items():
            whole = layout.sums[name]
            dtype = torch_dtype(whole.dtype)
            for part in parts:
                if part.rank == rank:
                    view = self._view(part.piece, part.position, part.count, dtype)
                    yield Shard(name, view, part.offset, whole.shape)

    def clear(self) -> None:
        """Free all memory."""
        self._views.clear()
        self.pieces.clear()

    def _reserve(self, used: list[int], size: int) -> tuple[int, int]:
        """Find the piece and the position for `size` more bytes."""
        piece = len(used) - 1
        position = -(-used[piece] // _ALIGN) * _ALIGN
        if used[piece] and position + size > self.pieces[piece].numel():
            used.append(0)
            piece, position = piece + 1, 0
        self._ensure(piece, position + size)
        return piece, position

    def _ensure(self, piece: int, size: int) -> None:
        """Make a piece, or replace one that is too small."""
        if piece == len(self.pieces):
            self.pieces.append(self._allocate(piece, max(size, self._piece_bytes)))
        elif self.pieces[piece].numel() < size:
            self._views.clear()
            self.pieces[piece] = self._allocate(piece, size)

    def _view(self, piece: int, position: int, count: int, dtype: torch.dtype) -> Tensor:
        """View elements in a piece. Views are the same in every version and kept: making them takes long."""
        key = (piece, position, count, dtype)
        view = self._views.get(key)
        if view is None:
            raw = self.pieces[piece][position : position + count * dtype.itemsize]
            view = self._views[key] = raw.view(dtype)
        return view


class SharedBuffer:
    """One process's memory for versions that other processes map: host memory, memory of its GPU, or both.

    `current` is where the version was stored first, `handles` are those of the pieces on the GPU.
    """

    def __init__(self, prefix: str, number: int, rank: int, piece_bytes: int) -> None:
        self.handles: list[str] = []
        self._prefix, self._number, self._rank = prefix, number, rank
        self._host = ShardBuffer(self._host_piece, piece_bytes)
        self._on_device = ShardBuffer(self._device_piece, _FIRST_DEVICE_BYTES)
        self._device = torch.device("cpu")
        self._pinned = False
        self.current = self._host

    def fill(self, shards: Iterable[Shard], device: torch.device | None, *, pinned: bool) -> RankParts:
        """Store the shards on GPU `device`, or in host memory, `pinned` for copies from a GPU."""
        self.current = self._host if device is None else self._on_device
        self._device = device or self._device
        self._pinned = self._pinned or pinned
        return self.current.fill(shards, self._rank)

    def copy_to_host(self, sizes: list[int]) -> None:
        """Copy the version from the GPU; `sizes` bytes of each piece are in use."""
        self._host.copy_from(self._on_device, sizes)
        torch.cuda.synchronize(self._device)

    def clear(self) -> None:
        """Free all memory."""
        for piece, memory in enumerate(self._host.pieces):
            if self._pinned:
                device_memory.unpin(memory)
            host_memory.segment_path(self._prefix, self._number, self._rank, piece).unlink(missing_ok=True)
        self._host.clear()
        self._on_device.clear()
        for handle in self.handles:
            device_memory.release(handle)
        self.handles.clear()
        if self._rank == 0:
            host_memory.table_path(self._prefix, self._number).unlink(missing_ok=True)

    def _host_piece(self, piece: int, size: int) -> Tensor:
        if self._pinned and piece < len(self._host.pieces):
            device_memory.unpin(self._host.pieces[piece])
        memory = host_memory.create_segment(
            host_memory.segment_path(self._prefix, self._number, self._rank, piece), size
        )
        if self._pinned:
            device_memory.pin(memory)
        return memory

    def _device_piece(self, piece: int, size: int) -> Tensor:
        if piece < len(self.handles):
            device_memory.release(self.handles.pop(piece))
        size = max(size, min(_FIRST_DEVICE_BYTES << piece, _LAST_DEVICE_BYTES))
        memory, handle = device_memory.allocate(size, self._device)
        self.handles.insert(piece, handle)
        return memory


@dataclass(slots=True)
class StoredVersion:
    version: int
    layout: Layout
    buffer: ShardBuffer
    readers: int = 0


class VersionStore:
    """The newest two versions, and older ones that are being fetched. Thread-safe.

    A new version never waits for readers of an old one: it then gets a buffer of its own.
    """

    def __init__(self, allocate: Allocate, piece_bytes: int = PIECE_BYTES) -> None:
        self._allocate, self._piece_bytes = allocate, piece_bytes
        self._lock = threading.Lock()
        self._versions: list[StoredVersion] = []

    def free_buffer(self) -> ShardBuffer:
        """Return a buffer to fill: that of a version that is neither kept nor read any more, or a new one."""
        with self._lock:
            for stored in self._versions[: -_KEEP_LAST + 1]:
                if not stored.readers:
                    self._versions.remove(stored)
                    return stored.buffer
        return ShardBuffer(self._allocate, self._piece_bytes)

    def add(self, version: int, layout: Layout, buffer: ShardBuffer) -> None:
        """Store a filled buffer as the newest version."""
        with self._lock:
            self._versions = [stored for stored in self._versions if stored.version < version]
            self._versions.append(StoredVersion(version, layout, buffer))

    def available(self) -> list[int]:
        """List the versions that engines may ask for."""
        with self._lock:
            return [stored.version for stored in self._versions[-_KEEP_LAST:]]

    @contextmanager
    def read(self, version: int) -> Iterator[StoredVersion | None]:
        """Hold a version, which stays unchanged meanwhile; None where it is not stored."""
        with self._lock:
            stored = next((stored for stored in self._versions if stored.version == version), None)
            if stored is not None:
                stored.readers += 1
        try:
            yield stored
        finally:
            with self._lock:
                if stored is not None:
                    stored.readers -= 1

    def clear(self) -> None:
        with self._lock:
            self._versions.clear()
