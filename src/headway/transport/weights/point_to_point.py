"""Weights straight into engine processes: every trainer rank sends its own shards to every engine that asks.

The trainer never waits for an engine. `publish` copies the version aside and announces it; a thread per rank watches
a store for requests and serves each from the copy. So an engine may come late, or die halfway: its request times
out, and nobody else notices.
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
from headway.core.protocol import WeightProbe, WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.weights.announcements import announce, announced, withdraw
from headway.transport.weights.arena import SLAB_BYTES
from headway.transport.weights.base import NamedTensors
from headway.transport.weights.channels import AHEAD, backend_between, gpu_name, receive, send
from headway.transport.weights.layout import Arrival, Layout, gather_layout
from headway.transport.weights.mappings import Mappings
from headway.transport.weights.pairing import connect_store, open_store, paired
from headway.transport.weights.parking import park
from headway.transport.weights.ranks import barrier, on_rank_zero, rank_and_ranks
from headway.transport.weights.shards import Shard, shards
from headway.transport.weights.shelf import Shelf

_log = logging.getLogger("headway.weights")
_POLL_SECONDS = 0.02
_REQUESTS = "requests"
CHUNK_BYTES = 1 << 24
"""What travels at a time: messages are slow to begin, and memory for them is kept."""


class _Request(msgspec.Struct, frozen=True):
    """What an engine asks all ranks for. `gpu` is the name of its own, "" where it has none."""

    version: int
    gpu: str = ""


class PointToPointSender:
    """Rank 0 holds the store; every rank holds and sends its own shards."""

    def __init__(
        self, settings: PointToPointWeights, paths: RunPaths, policy: str = "policy", slab_bytes: int = SLAB_BYTES
    ) -> None:
        self._paths = paths
        self._policy = policy
        self._host = settings.host
        self._rank, self._ranks = rank_and_ranks()
        self._master = open_store(self._host) if self._rank == 0 else None
        self._port = on_rank_zero(lambda: self._master.port if self._master else 0)
        self._shelf = Shelf(self._slab, slab_bytes)
        self._gpu: torch.device | None = None
        self._last: WeightUpdate | None = None
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="weights", daemon=True)
        self._watcher.start()

    def publish(
        self,
        version: int,
        tensors: NamedTensors,
        adapter: str | None = None,
        probe: WeightProbe | None = None,
        dtype: torch.dtype | None = None,
    ) -> WeightUpdate:
        arena = self._shelf.spare()
        if self._last is not None:
            self._retire()
        mine = arena.fill(self._noted(shards(tensors, self._rank, self._ranks, dtype)), self._rank)
        layout = gather_layout(mine, self._ranks)
        self._shelf.put(version, layout, arena)
        barrier()  # an engine that reads the announcement finds every rank ready
        transport = {"type": "point_to_point", "host": self._host, "port": self._port}
        update = WeightUpdate(version, layout.fingerprint, transport, policy=self._policy, adapter=adapter, probe=probe)
        on_rank_zero(lambda: self._post(update, layout))
        self._last = update
        return update

    def close(self) -> None:
        """Stop serving; the last version goes to disk for engines to come."""
        self._stop.set()
        self._watcher.join()
        newest = self._shelf.newest
        if self._last is not None and newest is not None:
            park(self._paths, self._last, newest.layout, newest.arena, self._rank)
        self._last = None
        self._shelf.clear()
        self._master = None

    def _post(self, update: WeightUpdate, layout: Layout) -> None:
        assert self._master is not None
        self._master.set(_layout_key(update.version), msgspec.json.encode(layout).decode())
        announce(self._paths, update, durable=False)
        self._retire()

    def _retire(self) -> None:
        """Take back what can be fetched no longer, before its memory is used again."""
        if self._master is not None:
            for version in set(announced(self._paths)) - set(self._shelf.offered):
                withdraw(self._paths, version)
                self._master.delete_key(_layout_key(version))

    def _noted(self, mine: Iterator[Shard]) -> Iterator[Shard]:
        """Note the GPU that weights come from, before memory for them is made."""
        for shard in mine:
            if self._gpu is None and shard.tensor.is_cuda:
                self._gpu = shard.tensor.device
                connect_store(self._host, self._port).set(_gpu_key(self._rank), gpu_name(self._gpu))
            yield shard

    def _slab(self, number: int, size: int) -> Tensor:
        """In the host's memory, since trainers need that of their GPU; pinned, so that a GPU copies by itself."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._gpu is not None)

    def _watch(self) -> None:
        """Start a thread per request, until told to stop or until rank 0 and its store are gone."""
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
                _log.error("weights are served no longer: %s", error)

    def _serve(self, request: int) -> None:
        """Send this rank's pieces. An engine that fails to take them costs a line in the log."""
        try:
            store = connect_store(self._host, self._port)
            asked = msgspec.json.decode(store.get(_request_key(request)), type=_Request)
            with self._shelf.borrow(asked.version) as held:
                pieces = held.layout.pieces[self._rank] if held else []
                if held is None or not any(pieces):
                    return
                backend = backend_between(gpu_name(self._gpu) if self._gpu else "", asked.gpu)
                slabs = held.arena.slabs
                chunks = (slabs[piece][start:end] for piece, start, end in _chunks(pieces))
                with paired(store, _group_name(request, self._rank), 0, self._host, backend) as group:
                    send(group, chunks, self._gpu if backend == "nccl" else None)
        except RuntimeError as error:
            _log.warning("an engine did not take weights from rank %d: %s", self._rank, _first_line(error))


def fetch(update: WeightUpdate, mappings: Mappings) -> tuple[Layout, Iterator[Arrival]]:
    """Ask the trainer for a version and take each rank's pieces as they come."""
    host, port = update.transport["host"], update.transport["port"]
    with _explained(update.version, host, port):
        store = connect_store(host, port)
        if not store.check([_layout_key(update.version)]):
            raise HeadwayError(f"the trainer no longer holds version {update.version}; ask for the latest one")
        layout = msgspec.json.decode(store.get(_layout_key(update.version)), type=Layout)
        return layout, _receive(store, layout, update, mappings)


def _receive(store: Any, layout: Layout, update: WeightUpdate, mappings: Mappings) -> Iterator[Arrival]:
    host, port = update.transport["host"], update.transport["port"]
    gpu = gpu_name(mappings.device) if mappings.device.type == "cuda" else ""
    with _explained(update.version, host, port):
        request = store.add(_REQUESTS, 1) - 1
        store.set(_request_key(request), msgspec.json.encode(_Request(update.version, gpu)).decode())
        contents = mappings.contents(layout)
        for rank, pieces in enumerate(layout.pieces):
            if not any(pieces):
                continue
            theirs = store.get(_gpu_key(rank)).decode() if store.check([_gpu_key(rank)]) else ""
            backend = backend_between(theirs, gpu)
            chunks = list(_chunks(pieces))
            scratch = mappings.scratch(AHEAD + 1, CHUNK_BYTES, on_device=backend == "nccl")
            with paired(store, _group_name(request, rank), 1, host, backend) as group:
                arrived = receive(group, (end - start for _, start, end in chunks), scratch)
                for (piece, start, _), data in zip(chunks, arrived, strict=True):
                    yield from contents.arrivals(rank, piece, data, start, lasts=False)


@contextmanager
def _explained(version: int, host: str, port: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise HeadwayError(
            f"version {version} could not be fetched from the trainer at {host}:{port}: {_first_line(error)}"
        ) from error


def _chunks(pieces: list[int]) -> Iterator[tuple[int, int, int]]:
    """What travels at a time: the number of a piece, and from where to where in it."""
    for piece, size in enumerate(pieces):
        for start in range(0, size, CHUNK_BYTES):
            yield piece, start, min(start + CHUNK_BYTES, size)


def _layout_key(version: int) -> str:
    return f"layout/{version}"


def _gpu_key(rank: int) -> str:
    """Is there where a rank's weights are on a GPU."""
    return f"gpu/{rank}"


def _request_key(request: int) -> str:
    return f"request/{request}"


def _group_name(request: int, rank: int) -> str:
    return f"pair/{request}/{rank}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
