"""Weights through memory of one host: ranks write slabs that engines map, two versions in turn.

Where the trainer is one process on a GPU the slabs are memory of that GPU, and an engine on the same GPU copies within
it. Engines elsewhere say that they want the host's memory, and from then on get it.
"""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import write_atomic
from headway.core.protocol import WeightProbe, WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.weights import segments
from headway.transport.weights.announcements import announce, announced, withdraw
from headway.transport.weights.arena import SLAB_BYTES
from headway.transport.weights.base import NamedTensors
from headway.transport.weights.buffers import Buffer
from headway.transport.weights.device_memory import gpu_uuid
from headway.transport.weights.layout import Arrival, Contents, Layout, gather_layout
from headway.transport.weights.mappings import Mappings
from headway.transport.weights.parking import park
from headway.transport.weights.ranks import on_rank_zero, rank_and_ranks
from headway.transport.weights.shards import Shard, shards

_log = logging.getLogger("headway.weights")
_BUFFERS = 2
_POLL_SECONDS = 0.02
_WAIT_SECONDS = 60.0


class OnDevice(msgspec.Struct, frozen=True):
    """Slabs in the memory of GPU `uuid`."""

    uuid: str
    handles: list[str]


class Posted(msgspec.Struct, frozen=True):
    """The content of a buffer's table, which is gone while the buffer is being written. `host`: whether the version
    lies in the host's memory; `device`: where else."""

    version: int
    layout: Layout
    host: bool = True
    device: OnDevice | None = None


class SharedMemorySender:
    """Version v lies in buffer v mod 2, so that engines read one while the next is written."""

    def __init__(self, paths: RunPaths, policy: str = "policy", slab_bytes: int = SLAB_BYTES) -> None:
        self._paths = paths
        self._policy = policy
        self._rank, self._ranks = rank_and_ranks()
        _one_host(self._ranks)
        self._prefix = on_rank_zero(lambda: segments.prefix_of(paths.root.name))
        on_rank_zero(segments.sweep)
        self._buffers = [Buffer(self._prefix, number, self._rank, slab_bytes) for number in range(_BUFFERS)]
        self._posted: dict[int, Posted] = {}
        self._last: tuple[WeightUpdate, Layout, Buffer] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        self._host_wanted = False

    def publish(
        self,
        version: int,
        tensors: NamedTensors,
        adapter: str | None = None,
        probe: WeightProbe | None = None,
        dtype: torch.dtype | None = None,
    ) -> WeightUpdate:
        with self._lock:
            number = version % _BUFFERS
            buffer, table = self._buffers[number], segments.table(self._prefix, number)
            on_rank_zero(lambda: table.unlink(missing_ok=True))
            self._posted.pop(number, None)
            gpu, mine = _gpu_of(shards(tensors, self._rank, self._ranks, dtype))
            device = gpu if self._ranks == 1 else None
            filled = buffer.fill(mine, device, pinned=gpu is not None)
            layout = gather_layout(filled, self._ranks)
            where = None if device is None else OnDevice(gpu_uuid(device), buffer.handles[: len(filled.pieces)])
            posted = self._on_host(buffer, Posted(version, layout, device is None, where))
            transport = {"type": "shared_memory", "host": socket.gethostname(), "prefix": self._prefix}
            update = WeightUpdate(
                version,
                layout.fingerprint,
                transport | {"buffer": number},
                policy=self._policy,
                adapter=adapter,
                probe=probe,
            )
            on_rank_zero(lambda: self._post(table, posted, update))
            self._posted[number], self._last = posted, (update, layout, buffer)
        if device is not None and self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="weights", daemon=True)
            self._watcher.start()
        return update

    def close(self) -> None:
        """Keep the last version on disk for engines to come, and give the memory back."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._last is not None:
            update, layout, buffer = self._last
            park(self._paths, update, layout, buffer.arena, self._rank)
            self._last = None
        for buffer in self._buffers:
            buffer.clear()
        if self._rank == 0:
            segments.wanted(self._prefix).unlink(missing_ok=True)

    def _post(self, table: Path, posted: Posted, update: WeightUpdate) -> None:
        write_atomic(table, msgspec.json.encode(posted), durable=False)
        announce(self._paths, update, durable=False)
        for version in announced(self._paths)[:-_BUFFERS]:
            withdraw(self._paths, version)

    def _watch(self) -> None:
        """Wait for an engine that wants the host's memory; then what is posted goes there too."""
        wanted = segments.wanted(self._prefix)
        while not wanted.exists():
            if self._stop.wait(_POLL_SECONDS):
                return
        with self._lock:
            self._host_wanted = True
            try:
                for number, posted in self._posted.items():
                    self._posted[number] = self._on_host(self._buffers[number], posted)
                    table = segments.table(self._prefix, number)
                    write_atomic(table, msgspec.json.encode(self._posted[number]), durable=False)
            except (OSError, RuntimeError, HeadwayError) as error:
                _log.error("weights could not be copied into the host's memory: %s", error)

    def _on_host(self, buffer: Buffer, posted: Posted) -> Posted:
        if posted.host or not self._host_wanted:
            return posted
        buffer.copy_to_host(posted.layout.pieces[self._rank])
        return msgspec.structs.replace(posted, host=True)


def fetch(update: WeightUpdate, mappings: Mappings) -> tuple[Layout, Iterator[Arrival]]:
    """Views of the trainer's memory; if it is written over before the last one was taken, HeadwayError."""
    prefix, buffer, host = (update.transport[key] for key in ("prefix", "buffer", "host"))
    if host != socket.gethostname():
        raise HeadwayError(
            f"weights are in the memory of {host}, this engine runs on {socket.gethostname()}; "
            'set weights.type = "point_to_point" or "filesystem"'
        )
    table = segments.table(prefix, buffer)
    posted = _posted(table, update)
    mappings.keep(prefix)
    pieces = _pieces_on_device(posted, prefix, mappings)
    if pieces is None:
        posted = _posted_on_host(posted, table, prefix, update)
        pieces = (
            (rank, piece, mappings.open(segments.segment(prefix, buffer, rank, piece), size))
            for rank, sizes in enumerate(posted.layout.pieces)
            for piece, size in enumerate(sizes)
        )
    return posted.layout, _read(pieces, mappings.contents(posted.layout), table, update)


def _pieces_on_device(posted: Posted, prefix: str, mappings: Mappings) -> Iterator[tuple[int, int, Tensor]] | None:
    """Slabs in the memory of the engine's own GPU; None where they lie elsewhere, or can't be opened."""
    if posted.device is None or mappings.device.type != "cuda" or posted.device.uuid != gpu_uuid(mappings.device):
        return None
    _demand_trainer(prefix, posted.version)
    try:
        slabs = [
            mappings.open_handle(prefix, handle, size)
            for handle, size in zip(posted.device.handles, posted.layout.pieces[0], strict=True)
        ]
    except HeadwayError as error:
        _log.warning("weights come through the host's memory, which is slower: %s", error)
        return None
    return ((0, piece, slab) for piece, slab in enumerate(slabs))


def _posted_on_host(posted: Posted, table: Path, prefix: str, update: WeightUpdate) -> Posted:
    """Where the version is on the trainer's GPU alone, ask for it and wait."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not posted.host:
        segments.wanted(prefix).touch(mode=0o600)
        _demand_trainer(prefix, update.version)
        if time.monotonic() > deadline:
            raise HeadwayError(f"the trainer did not put version {update.version} into the host's memory in time")
        time.sleep(_POLL_SECONDS)
        posted = _posted(table, update)
    return posted


def _demand_trainer(prefix: str, version: int) -> None:
    if segments.gone(prefix):
        raise HeadwayError(
            f"version {version} was in the memory of a trainer that has ended; a new one publishes again when it starts"
        )


def _read(
    pieces: Iterator[tuple[int, int, Tensor]], contents: Contents, table: Path, update: WeightUpdate
) -> Iterator[Arrival]:
    for rank, piece, data in pieces:
        yield from contents.arrivals(rank, piece, data)
    _posted(table, update)


def _posted(table: Path, update: WeightUpdate) -> Posted:
    """The table of the update's buffer. Raises HeadwayError when the buffer holds, by now, something else."""
    with suppress(OSError, msgspec.DecodeError):
        posted = msgspec.json.decode(table.read_bytes(), type=Posted)
        if posted.version == update.version:
            return posted
    raise HeadwayError(f"version {update.version} is no longer in shared memory; ask for the latest one")


def _gpu_of(mine: Iterator[Shard]) -> tuple[torch.device | None, Iterator[Shard]]:
    """The GPU that weights come from, if they do, and all of them."""
    first = list(islice(mine, 1))
    gpu = first[0].tensor.device if first and first[0].tensor.is_cuda else None
    return gpu, chain(first, mine)


def _one_host(ranks: int) -> None:
    hosts = [socket.gethostname()] * ranks
    if ranks > 1:
        dist.all_gather_object(hosts, socket.gethostname())
    if len(set(hosts)) > 1:
        raise UsageError(f'weights.type = "shared_memory" needs one host, the trainer runs on {sorted(set(hosts))}')
