"""Weights through memory of one host: processes write buffers that engines map, two versions in turn.

Where the trainer is one process on a GPU, buffers are memory of that GPU, and an engine on the same GPU copies within
it. An engine elsewhere asks for host memory, and from then on every version is there too.
"""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from headway.base.errors import HeadwayError, UsageError
from headway.base.files import write_atomic
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.announcements import announce
from headway.transport.weights import device_memory, host_memory
from headway.transport.weights.buffers import PIECE_BYTES, SharedBuffer
from headway.transport.weights.filesystem import save_last_version
from headway.transport.weights.layout import Arrival, Contents, Layout
from headway.transport.weights.mapped_memory import MappedMemory
from headway.transport.weights.publish import WeightSender
from headway.transport.weights.shards import Shard

logger = logging.getLogger(__name__)
_BUFFERS = 2
_POLL_SECONDS = 0.02
_WAIT_SECONDS = 60.0


class DevicePieces(msgspec.Struct, frozen=True):
    """Handles of the pieces in the memory of GPU `uuid`."""

    uuid: str
    handles: list[str]


class BufferTable(msgspec.Struct, frozen=True):
    """Describes what a buffer holds; there is none while the buffer is being written. The version is in host memory
    (`host`), in GPU memory (`device`), or in both."""

    version: int
    layout: Layout
    host: bool = True
    device: DevicePieces | None = None

    def write(self, path: Path) -> None:
        write_atomic(path, msgspec.json.encode(self), durable=False)


class SharedMemorySender(WeightSender):
    """Version v is in buffer v mod 2, so that engines read one while the next is written."""

    def __init__(self, paths: RunPaths, policy: str = "policy", piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__(paths, policy)
        hosts = sorted(set(self._publishers.gather(socket.gethostname())))
        if len(hosts) > 1:
            raise UsageError(f'weights.type = "shared_memory" needs one host, the trainer runs on {hosts}')
        self._prefix = self._publishers.on_first(lambda: host_memory.prefix_of(paths.root.name))
        self._publishers.on_first(host_memory.remove_stale_segments)
        self._buffers = [SharedBuffer(self._prefix, number, self._rank, piece_bytes) for number in range(_BUFFERS)]
        self._tables: dict[int, BufferTable] = {}
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        self._host_wanted = False

    def close(self) -> None:
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._last is not None:
            update, layout = self._last
            shards = self._buffers[update.version % _BUFFERS].current.shards(layout, self._rank)
            save_last_version(self._paths, update, layout, self._rank, shards)
            self._last = None
        for buffer in self._buffers:
            buffer.clear()
        if self._rank == 0:
            host_memory.wanted_path(self._prefix).unlink(missing_ok=True)

    def _store(self, version: int, shards: Iterator[Shard]) -> tuple[Layout, dict[str, Any]]:
        number = version % _BUFFERS
        buffer = self._buffers[number]
        self._publishers.on_first(lambda: host_memory.table_path(self._prefix, number).unlink(missing_ok=True))
        self._tables.pop(number, None)
        gpu, shards = _gpu_of(shards)
        device = gpu if self._publishers.size == 1 else None
        stored = buffer.fill(shards, device, pinned=gpu is not None)
        layout = self._gather(stored)
        handles = buffer.handles[: len(stored.pieces)]
        pieces = None if device is None else DevicePieces(device_memory.gpu_uuid(device), handles)
        self._tables[number] = self._on_host(buffer, BufferTable(version, layout, device is None, pieces))
        if device is not None and self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="weights", daemon=True)
            self._watcher.start()
        transport = {"type": "shared_memory", "host": socket.gethostname(), "prefix": self._prefix, "buffer": number}
        return layout, transport

    def _announce(self, update: WeightUpdate, layout: Layout) -> None:
        number = update.version % _BUFFERS
        self._tables[number].write(host_memory.table_path(self._prefix, number))
        announce(self._paths, update, keep_last=_BUFFERS, durable=False)

    def _watch(self) -> None:
        """Wait for an engine that needs host memory; then copy what is published there too."""
        while not host_memory.wanted_path(self._prefix).exists():
            if self._stop.wait(_POLL_SECONDS):
                return
        with self._lock:
            self._host_wanted = True
            try:
                for number, table in self._tables.items():
                    self._tables[number] = self._on_host(self._buffers[number], table)
                    self._tables[number].write(host_memory.table_path(self._prefix, number))
            except (OSError, RuntimeError, HeadwayError) as error:
                logger.error("weights could not be copied into host memory: %s", error)

    def _on_host(self, buffer: SharedBuffer, table: BufferTable) -> BufferTable:
        if table.host or not self._host_wanted:
            return table
        buffer.copy_to_host(table.layout.pieces[self._rank])
        return msgspec.structs.replace(table, host=True)


def fetch(update: WeightUpdate, memory: MappedMemory) -> tuple[Layout, Iterator[Arrival]]:
    """View the trainer's memory. Raises HeadwayError if it is overwritten before the last part was taken."""
    prefix, number, host = (update.transport[key] for key in ("prefix", "buffer", "host"))
    if host != socket.gethostname():
        raise HeadwayError(
            f"weights are in the memory of {host}, this engine runs on {socket.gethostname()}; "
            'set weights.type = "point_to_point" or "filesystem"'
        )
    path = host_memory.table_path(prefix, number)
    table = _read_table(path, update)
    memory.release(keep=prefix)
    pieces = _device_pieces(table, prefix, memory)
    if pieces is None:
        table = _wait_for_host(table, path, prefix, update)
        pieces = (
            (rank, piece, memory.open(host_memory.segment_path(prefix, number, rank, piece), size))
            for rank, sizes in enumerate(table.layout.pieces)
            for piece, size in enumerate(sizes)
        )
    return table.layout, _read(pieces, memory.contents(table.layout), path, update)


def _read(
    pieces: Iterator[tuple[int, int, Tensor]], contents: Contents, path: Path, update: WeightUpdate
) -> Iterator[Arrival]:
    for rank, piece, data in pieces:
        yield from contents.arrivals(rank, piece, data)
    _read_table(path, update)


def _read_table(path: Path, update: WeightUpdate) -> BufferTable:
    """Read the table of the update's buffer. Raises HeadwayError when the buffer now holds something else."""
    with suppress(OSError, msgspec.DecodeError):
        table = msgspec.json.decode(path.read_bytes(), type=BufferTable)
        if table.version == update.version:
            return table
    raise HeadwayError(f"version {update.version} is no longer in shared memory; ask for the latest one")


def _device_pieces(table: BufferTable, prefix: str, memory: MappedMemory) -> Iterator[tuple[int, int, Tensor]] | None:
    """Open the pieces in the memory of the engine's own GPU; None where they are elsewhere, or can't be opened."""
    device = table.device
    if device is None or memory.device.type != "cuda" or device.uuid != device_memory.gpu_uuid(memory.device):
        return None
    _check_trainer_lives(prefix, table.version)
    try:
        handles = zip(device.handles, table.layout.pieces[0], strict=True)
        pieces = [memory.open_handle(prefix, handle, size) for handle, size in handles]
    except HeadwayError as error:
        logger.warning("weights come through host memory, which is slower: %s", error)
        return None
    return ((0, piece, data) for piece, data in enumerate(pieces))


def _wait_for_host(table: BufferTable, path: Path, prefix: str, update: WeightUpdate) -> BufferTable:
    """Ask for a version in host memory and wait, if it is on the trainer's GPU only."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not table.host:
        host_memory.wanted_path(prefix).touch(mode=0o600)
        _check_trainer_lives(prefix, update.version)
        if time.monotonic() > deadline:
            raise HeadwayError(f"the trainer did not put version {update.version} into host memory in time")
        time.sleep(_POLL_SECONDS)
        table = _read_table(path, update)
    return table


def _check_trainer_lives(prefix: str, version: int) -> None:
    if host_memory.owner_ended(prefix):
        raise HeadwayError(
            f"version {version} was in the memory of a trainer that has ended; a new one publishes again when it starts"
        )


def _gpu_of(shards: Iterator[Shard]) -> tuple[torch.device | None, Iterator[Shard]]:
    """The GPU that the shards are on, if they are, and all of them."""
    first = list(islice(shards, 1))
    gpu = first[0].tensor.device if first and first[0].tensor.is_cuda else None
    return gpu, chain(first, shards)
