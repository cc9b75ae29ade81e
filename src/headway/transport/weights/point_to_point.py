"""Weights from the memory of the trainer's processes to engines, in a tree: NCCL between two GPUs, gloo otherwise.

The trainer never waits for an engine. `publish` copies the version and announces it; a thread per process watches a
store for requests and serves each from the copy. The first engine that comes asks the trainer, the others ask engines
that came before, which send on what they receive. So the trainer sends a version once. An engine may come late, or die
halfway: those below it go on with the one above it, in the end with the trainer.
"""

import logging
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.config.shared import PointToPointWeights
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.announcements import announce, announced, withdraw
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
from headway.transport.weights.relays.pieces import (
    CHUNK_BYTES,
    ArrivingPieces,
    Ask,
    Chunk,
    Member,
    PieceRelay,
    ask_engine,
    chunks_of,
    receive_bytes,
)
from headway.transport.weights.shards import Shard

logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.02
_REQUESTS = "requests"


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
            request = msgspec.json.decode(store.get(_request_key(number)), type=Ask)
            with self._versions.read(request.version) as stored:
                wanted = chunks_of(stored.layout)[request.first :] if stored else []
                mine = [chunk for chunk in wanted if chunk.rank == self._rank]
                if stored is None or not mine:
                    return
                backend = pair_backend(gpu_name(self._gpu) if self._gpu else "", request.gpu)
                pieces = stored.buffer.pieces
                chunks = (pieces[chunk.piece][chunk.start : chunk.end] for chunk in mine)
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
    """Receive a version from an engine above, the rest from the next where that fails, in the end from the trainer."""
    host, port = update.transport["host"], update.transport["port"]
    relay = _relay(memory, host, port)
    held, again = relay.hold(update.version, layout, memory.forget_views)
    try:
        with _explain_errors(update.version, host, port):
            # What came from an engine the first time may be why there is a second.
            for engine in [] if again else relay.join(store, update.version):
                try:
                    yield from _from_engine(store, engine, held, memory, relay.member.gpu, host)
                    return
                except (RuntimeError, OSError) as error:
                    at = f"{engine.host}:{engine.port}"
                    logger.info("version %d goes on without the engine at %s: %s", held.version, at, _first_line(error))
            yield from _from_trainer(store, held, memory, relay.member.gpu, host)
    except BaseException:
        held.fail()
        raise


def _relay(memory: MappedMemory, host: str, port: int) -> PieceRelay:
    relay = memory.relays.get("point_to_point")
    if isinstance(relay, PieceRelay) and relay.store == (host, port):
        return relay
    if relay is not None:
        relay.close()
    made = memory.relays["point_to_point"] = PieceRelay(host, port, memory.device)
    return made


def _from_engine(
    store: Any, engine: Member, held: ArrivingPieces, memory: MappedMemory, gpu: str, host: str
) -> Iterator[Arrival]:
    """Receive the chunks that have not arrived from another engine. Raises RuntimeError or OSError."""
    missing, pair = held.chunks[held.arrived :], f"relay/{secrets.token_hex(8)}"
    with ask_engine(engine, Ask(held.version, gpu, held.arrived, pair)) as connection:
        if pair_backend(engine.gpu, gpu) == "nccl":
            with process_pair(store, pair, 1, host, "nccl") as group:
                yield from _through_gpu(group, held, missing, memory)
        else:
            arriving = receive_bytes(connection, (held.place(chunk) for chunk in missing))
            yield from _keep(held, missing, arriving, memory)


def _from_trainer(store: Any, held: ArrivingPieces, memory: MappedMemory, gpu: str, host: str) -> Iterator[Arrival]:
    """Receive the chunks that have not arrived, process by process."""
    request = store.add(_REQUESTS, 1) - 1
    store.set(_request_key(request), msgspec.json.encode(Ask(held.version, gpu, held.arrived)).decode())
    missing = held.chunks[held.arrived :]
    for rank in sorted({chunk.rank for chunk in missing}):
        mine = [chunk for chunk in missing if chunk.rank == rank]
        sender_gpu = store.get(_gpu_key(rank)).decode() if store.check([_gpu_key(rank)]) else ""
        backend = pair_backend(sender_gpu, gpu)
        with process_pair(store, _pair_name(request, rank), 1, host, backend) as group:
            if backend == "nccl":
                yield from _through_gpu(group, held, mine, memory)
            else:
                arriving = receive_chunks(group, [held.place(chunk) for chunk in mine])
                yield from _keep(held, mine, arriving, memory)


def _through_gpu(group: Any, held: ArrivingPieces, chunks: list[Chunk], memory: MappedMemory) -> Iterator[Arrival]:
    """Receive chunks on the GPU by NCCL, and copy them to where other engines are served from."""
    scratch = memory.scratch(IN_FLIGHT + 1, CHUNK_BYTES, on_device=True)
    places = [scratch[n % len(scratch)][: chunk.end - chunk.start] for n, chunk in enumerate(chunks)]
    yield from _keep(held, chunks, receive_chunks(group, places), memory)


def _keep(
    held: ArrivingPieces, chunks: list[Chunk], arriving: Iterator[Tensor], memory: MappedMemory
) -> Iterator[Arrival]:
    """Keep chunks for other engines as they arrive, and yield what they are made of."""
    contents = memory.contents(held.layout)
    for chunk, data in zip(chunks, arriving, strict=True):
        if data.is_cuda:
            held.place(chunk).copy_(data)
        held.advance()
        yield from contents.arrivals(chunk.rank, chunk.piece, data, chunk.start, lasts=False)


@contextmanager
def _explain_errors(version: int, host: str, port: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise HeadwayError(
            f"version {version} could not be fetched from the trainer at {host}:{port}: {_first_line(error)}"
        ) from error


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
