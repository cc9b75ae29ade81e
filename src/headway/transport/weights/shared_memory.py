"""Weights through shared memory on one host: ranks write slabs that engines map, two versions in turn."""

import contextlib
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import write_atomic
from headway.core.protocol import WeightProbe, WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.weights.announce import announce, announced, withdraw
from headway.transport.weights.arena import SLAB_BYTES, Arena
from headway.transport.weights.base import NamedTensors
from headway.transport.weights.layout import Assembler, Layout, gather_layout
from headway.transport.weights.mappings import Mappings
from headway.transport.weights.parking import park
from headway.transport.weights.ranks import on_rank_zero, rank_and_ranks
from headway.transport.weights.shards import shards

_BUFFERS = 2
_NAME = re.compile(r"headway-.+-(?P<space>\d+)-(?P<pid>\d+)-b\d+-.+")


class _Posted(msgspec.Struct):
    """The content of a buffer's table; it is gone while the buffer is being written."""

    version: int
    layout: Layout


class SharedMemorySender:
    """Version v lies in buffer v mod 2, so that engines read one while the next is written.

    Segments are files in memory whose names carry the run and the process, so that a later start can tell which
    ones a crash has left. An accelerator's memory handles would travel in the same table, as another kind of slab.
    """

    def __init__(self, paths: RunPaths, policy: str = "policy", slab_bytes: int = SLAB_BYTES) -> None:
        self._paths = paths
        self._policy = policy
        self._rank, self._ranks = rank_and_ranks()
        _one_host(self._ranks)
        run = re.sub(r"[^\w.]+", "_", paths.root.name)
        self._prefix = on_rank_zero(lambda: f"headway-{run}-{_process_space()}-{os.getpid()}")
        on_rank_zero(sweep)
        self._arenas = [Arena(partial(self._slab, buffer), slab_bytes) for buffer in range(_BUFFERS)]
        self._last: tuple[WeightUpdate, Layout, Arena] | None = None

    def publish(
        self, version: int, tensors: NamedTensors, adapter: str | None = None, probe: WeightProbe | None = None
    ) -> WeightUpdate:
        buffer = version % _BUFFERS
        table = _table(self._prefix, buffer)
        on_rank_zero(lambda: table.unlink(missing_ok=True))
        mine = self._arenas[buffer].fill(shards(tensors, self._rank, self._ranks), self._rank)
        layout = gather_layout(mine, self._ranks)
        transport = {"type": "shared_memory", "host": socket.gethostname(), "prefix": self._prefix, "buffer": buffer}
        update = WeightUpdate(version, layout.fingerprint, transport, policy=self._policy, adapter=adapter, probe=probe)
        on_rank_zero(lambda: self._post(table, _Posted(version, layout), update))
        self._last = (update, layout, self._arenas[buffer])
        return update

    def close(self) -> None:
        """Keep the last version on disk for engines to come, and remove the segments."""
        if self._last is not None:
            park(self._paths, *self._last, self._rank)
            self._last = None
        for buffer, arena in enumerate(self._arenas):
            for slab in range(len(arena.slabs)):
                _segment(self._prefix, buffer, self._rank, slab).unlink(missing_ok=True)
            arena.slabs.clear()
            if self._rank == 0:
                _table(self._prefix, buffer).unlink(missing_ok=True)

    def _post(self, table: Path, posted: _Posted, update: WeightUpdate) -> None:
        write_atomic(table, msgspec.json.encode(posted))
        announce(self._paths, update)
        for version in announced(self._paths)[:-_BUFFERS]:
            withdraw(self._paths, version)

    def _slab(self, buffer: int, slab: int, size: int) -> Tensor:
        path = _segment(self._prefix, buffer, self._rank, slab)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def fetch(update: WeightUpdate, mappings: Mappings) -> tuple[Layout, Iterator[tuple[str, Tensor]]]:
    """Views of the trainer's segments; if these are written over before the last one was taken, HeadwayError."""
    prefix, buffer, host = (update.transport[key] for key in ("prefix", "buffer", "host"))
    if host != socket.gethostname():
        raise HeadwayError(
            f"weights are in the memory of {host}, this engine runs on {socket.gethostname()}; "
            'set weights.type = "collective" or "filesystem"'
        )
    table = _table(prefix, buffer)
    layout = _posted(table, update).layout
    mappings.keep(lambda path: path.name.startswith(prefix))
    segments = (
        (rank, piece, mappings.open(_segment(prefix, buffer, rank, piece), size))
        for rank, pieces in enumerate(layout.pieces)
        for piece, size in enumerate(pieces)
    )
    return layout, _read(segments, layout, table, update)


def _read(
    segments: Iterator[tuple[int, int, Tensor]], layout: Layout, table: Path, update: WeightUpdate
) -> Iterator[tuple[str, Tensor]]:
    assembler = Assembler(layout)
    for rank, piece, data in segments:
        yield from assembler.piece(rank, piece, data)
    _posted(table, update)


def sweep() -> None:
    """Remove segments of processes that are gone."""
    for path in _folder().glob("headway-*"):
        match = _NAME.fullmatch(path.name)
        if match and match["space"] == _process_space() and not _alive(int(match["pid"])):
            path.unlink(missing_ok=True)


def _posted(table: Path, update: WeightUpdate) -> _Posted:
    """The table of the update's buffer. Raises HeadwayError when the buffer holds, by now, something else."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        posted = msgspec.json.decode(table.read_bytes(), type=_Posted)
        if posted.version == update.version:
            return posted
    raise HeadwayError(f"version {update.version} is no longer in shared memory; ask for the latest one")


def _segment(prefix: str, buffer: int, rank: int, slab: int) -> Path:
    return _folder() / f"{prefix}-b{buffer}-r{rank}-s{slab}"


def _table(prefix: str, buffer: int) -> Path:
    return _folder() / f"{prefix}-b{buffer}-table"


def _folder() -> Path:
    """Linux keeps shared memory here; elsewhere mapped temporary files serve as well."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() else Path(tempfile.gettempdir())


def _process_space() -> str:
    """Which processes our process numbers count: containers may share memory, but not numbers."""
    try:
        return re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        return "0"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _one_host(ranks: int) -> None:
    hosts = [socket.gethostname()] * ranks
    if ranks > 1:
        dist.all_gather_object(hosts, socket.gethostname())
    if len(set(hosts)) > 1:
        raise UsageError(f'weights.type = "shared_memory" needs one host, the trainer runs on {sorted(set(hosts))}')
