"""Weights from the memory of the trainer's processes to each engine that asks: NCCL between two GPUs, gloo otherwise.

The trainer never waits for an engine. `publish` copies the version and announces it; a thread per process watches a
store for requests and serves each from the copy. So an engine may come late, or die halfway: its request times out, and
nobody else notices.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor

from headway.config.shared import PointToPointWeights
from headway.core.errors import HeadwayError
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.weights.announcements import announce, announced, withdraw
from headway.transport.weights.buffers import PIECE_BYTES, VersionStore
from headway.transport.weights.filesystem import save_last_version
from headway.transport.weights.layout import Arrival, Layout
from headway.transport.weights.mapped_memory import MappedMemory
from headway.transport.weights.process_pairs import (
    IN_FLIGHT,
    connect_store,
    gpu_name,
    open_store,
    pair_backend,
    process_pair,
    receive_chunks,
    send_chunks,
)
from headway.transport.weights.publish import WeightSender
from headway.transport.weights.shards import Shard

logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.02
_REQUESTS = "requests"
CHUNK_BYTES = 1 << 24
"""Bytes sent at a time: messages are slow to begin, and memory for them is kept."""


class _Request(msgspec.Struct, frozen=True):
    """An engine's request to all processes of the trainer. `gpu` is the name of its own, "" where it has none."""

    version: int
    gpu: str = ""


class PointToPointSender(WeightSender):
    """The first process holds the store; every process holds and sends its own shards."""

    def __init__(
        self, settings: PointToPointWeights, paths: RunPaths, policy: str = "policy", piece_bytes: int = PIECE_BYTES
    ) -> None:
        super().__init__(paths, policy)
        self._host = settings.host
        self._master = open_store(self._host) if self._rank == 0 else None
        self._port = self._publishers.on_first(lambda: self._master.port if self._master else 0)
        self._versions = VersionStore(self._allocate, piece_bytes)
        self._gpu: torch.device | None = None
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="weights", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        self._stop.set()
        self._watcher.join()
        if self._last is not None:
            update, layout = self._last
            with self._versions.read(update.version) as stored:
                if stored is not None:
                    shards = stored.buffer.shards(layout, self._rank)
                    save_last_version(self._paths, update, layout, self._rank, shards)
        self._last = None
        self._versions.clear()
        self._master = None

    def _store(self, version: int, shards: Iterator[Shard]) -> tuple[Layout, dict[str, Any]]:
        buffer = self._versions.free_buffer()
        if self._last is not None:
            self._withdraw_unavailable()
        layout = self._gather(buffer.fill(self._note_gpu(shards), self._rank))
        self._versions.add(version, layout, buffer)
        self._publishers.barrier()  # an engine that reads the announcement finds every process ready
        return layout, {"type": "point_to_point", "host": self._host, "port": self._port}

    def _announce(self, update: WeightUpdate, layout: Layout) -> None:
        assert self._master is not None
        self._master.set(_layout_key(update.version), msgspec.json.encode(layout).decode())
        announce(self._paths, update, durable=False)
        self._withdraw_unavailable()

    def _withdraw_unavailable(self) -> None:
        """Withdraw versions that can no longer be fetched, before their memory is reused."""
        if self._master is not None:
            for version in set(announced(self._paths)) - set(self._versions.available()):
                withdraw(self._paths, version)
                self._master.delete_key(_layout_key(version))

    def _note_gpu(self, shards: Iterator[Shard]) -> Iterator[Shard]:
        """Note the GPU that weights come from, before memory for them is allocated."""
        for shard in shards:
            if self._gpu is None and shard.tensor.is_cuda:
                self._gpu = shard.tensor.device
                connect_store(self._host, self._port).set(_gpu_key(self._rank), gpu_name(self._gpu))
            yield shard

    def _allocate(self, _piece: int, size: int) -> Tensor:
        """Allocate host memory, since trainers need that of their GPU; pinned, so that a GPU copies on its own."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._gpu is not None)

    def _watch(self) -> None:
        """Start a thread per request, until told to stop or until the first process and its store are gone."""
        try:
            store = connect_store(self._host, self._port)
            seen = 0
            while not self._stop.wait(_POLL_SECONDS):
                asked = store.add(_REQUESTS, 0)
                for request in range(seen, asked):
                    threading.Thread(target=self._serve, args=(request,), name="weights", daemon=True).start()
                seen = asked
        except RuntimeError as error:
            if not self._stop.is_set():
                logger.error("weights are no longer served to engines: %s", error)

    def _serve(self, number: int) -> None:
        """Send this process's pieces. An engine that fails to take them costs a line in the log."""
        try:
            store = connect_store(self._host, self._port)
            request = msgspec.json.decode(store.get(_request_key(number)), type=_Request)
            with self._versions.read(request.version) as stored:
                sizes = stored.layout.pieces[self._rank] if stored else []
                if stored is None or not any(sizes):
                    return
                backend = pair_backend(gpu_name(self._gpu) if self._gpu else "", request.gpu)
                pieces = stored.buffer.pieces
                chunks = (pieces[piece][start:end] for piece, start, end in _chunks(sizes))
                with process_pair(store, _pair_name(number, self._rank), 0, self._host, backend) as group:
                    send_chunks(group, chunks, self._gpu if backend == "nccl" else None)
        except RuntimeError as error:
            logger.warning("an engine did not take weights from rank %d: %s", self._rank, _first_line(error))


def fetch(update: WeightUpdate, memory: MappedMemory) -> tuple[Layout, Iterator[Arrival]]:
    """Ask the trainer for a version, and receive each process's pieces as they come."""
    host, port = update.transport["host"], update.transport["port"]
    with _explain_errors(update.version, host, port):
        store = connect_store(host, port)
        if not store.check([_layout_key(update.version)]):
            raise HeadwayError(f"the trainer no longer holds version {update.version}; ask for the latest one")
        layout = msgspec.json.decode(store.get(_layout_key(update.version)), type=Layout)
        return layout, _receive(store, layout, update, memory)


def _receive(store: Any, layout: Layout, update: WeightUpdate, memory: MappedMemory) -> Iterator[Arrival]:
    host, port = update.transport["host"], update.transport["port"]
    gpu = gpu_name(memory.device) if memory.device.type == "cuda" else ""
    with _explain_errors(update.version, host, port):
        request = store.add(_REQUESTS, 1) - 1
        store.set(_request_key(request), msgspec.json.encode(_Request(update.version, gpu)).decode())
        contents = memory.contents(layout)
        for rank, sizes in enumerate(layout.pieces):
            if not any(sizes):
                continue
            sender_gpu = store.get(_gpu_key(rank)).decode() if store.check([_gpu_key(rank)]) else ""
            backend = pair_backend(sender_gpu, gpu)
            chunks = list(_chunks(sizes))
            scratch = memory.scratch(IN_FLIGHT + 1, CHUNK_BYTES, on_device=backend == "nccl")
            with process_pair(store, _pair_name(request, rank), 1, host, backend) as group:
                arrived = receive_chunks(group, (end - start for _, start, end in chunks), scratch)
                for (piece, start, _), data in zip(chunks, arrived, strict=True):
                    yield from contents.arrivals(rank, piece, data, start, lasts=False)


@contextmanager
def _explain_errors(version: int, host: str, port: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise HeadwayError(
            f"version {version} could not be fetched from the trainer at {host}:{port}: {_first_line(error)}"
        ) from error


def _chunks(sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Cut pieces into what is sent at a time: the number of a piece, and a range of its bytes."""
    for piece, size in enumerate(sizes):
        for start in range(0, size, CHUNK_BYTES):
            yield piece, start, min(start + CHUNK_BYTES, size)


def _layout_key(version: int) -> str:
    return f"layout/{version}"


def _gpu_key(rank: int) -> str:
    """Set where a process's weights are on a GPU."""
    return f"gpu/{rank}"


def _request_key(request: int) -> str:
    return f"request/{request}"


def _pair_name(request: int, rank: int) -> str:
    return f"pair/{request}/{rank}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
