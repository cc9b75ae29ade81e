"""Weights over a shared filesystem: one safetensors file per process in a folder per version, announced last."""

import logging
import mmap
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.base.files import reserve, sync_directory, write_atomic
from headway.config.shared import FilesystemWeights
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.announcements import announce, withdraw
from headway.transport.weights.fingerprint import Fingerprint, dtype_name
from headway.transport.weights.layout import Arrival, Layout, Part, RankParts
from headway.transport.weights.mapped_memory import MappedMemory
from headway.transport.weights.publish import WeightSender
from headway.transport.weights.shards import Shard

logger = logging.getLogger(__name__)
MANIFEST = "manifest.json"
"""File with the layout, in the folder of a version."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors files."""


class Manifest(msgspec.Struct):
    """The contents of a version's folder: tensors are under their names in the files of the processes."""

    version: int
    layout: Layout


class FilesystemSender(WeightSender):
    """Every process writes its own shards; only names and checksums are gathered.

    A version is not flushed to disk before it is announced: after a crash of the host the trainer publishes again from
    its checkpoint, and an engine verifies what it read by the fingerprint.
    """

    def __init__(self, settings: FilesystemWeights, paths: RunPaths, policy: str = "policy") -> None:
        super().__init__(paths, policy)
        # The version before the newest always stays: an engine may be reading it.
        self._keep_last = max(settings.keep_last, 2)

    def close(self) -> None:
        """Published versions stay: engines that start later read them."""

    def _store(self, version: int, shards: Iterator[Shard]) -> tuple[Layout, dict[str, Any]]:
        folder = self._paths.version(version)
        self._publishers.on_first(lambda: make_empty(unfinished(folder)))
        layout = self._gather(write_shards(unfinished(folder), self._rank, shards))
        return layout, _transport(folder)

    def _is_lost(self) -> bool:
        return super()._is_lost() or (
            self._last is not None and not (self._paths.version(self._last[0].version) / MANIFEST).exists()
        )

    def _announce(self, update: WeightUpdate, layout: Layout) -> None:
        _release(self._paths, update, layout, self._keep_last)


def save_last_version(
    paths: RunPaths, update: WeightUpdate, layout: Layout, rank: int, shards: Iterable[Shard], timeout: float = 60
) -> None:
    """Keep a version on disk that so far was in memory only, for engines that need it after the trainer has left.

    Every process writes its shards; the first waits for the others' and announces the version again. They meet through
    the filesystem alone, since a trainer that stops after a failure can't rely on its process group.
    """
    folder = unfinished(paths.version(update.version))
    own = folder / f"{rank}"
    own.mkdir(parents=True, exist_ok=True)
    write_shards(own, rank, shards)
    for file in own.iterdir():
        file.rename(folder / file.name)
    own.rmdir()
    if rank != 0:
        return
    wanted = sum(1 for pieces in layout.pieces if pieces)
    deadline = time.monotonic() + timeout
    while len(list(folder.glob("*.safetensors"))) < wanted:
        if time.monotonic() > deadline:
            logger.warning("version %d was not saved to disk: not every process wrote its part", update.version)
            return
        time.sleep(0.05)
    saved = msgspec.structs.replace(update, transport=_transport(paths.version(update.version)))
    _release(paths, saved, layout, keep_last=2)


def fetch(update: WeightUpdate, _memory: MappedMemory) -> tuple[Layout, Iterator[Arrival]]:
    """Read a version's folder. Files are mapped, not copied."""
    folder = Path(update.transport["path"])
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise HeadwayError(f"{folder}: no published version there ({error})") from None
    return manifest.layout, read_files(folder, manifest.layout)


def read_files(folder: Path, layout: Layout) -> Iterator[Arrival]:
    """Read the parts from the files of all processes. Raises HeadwayError where they are not what the layout says."""
    try:
        ranks = {part.rank for parts in layout.parts.values() for part in parts}
        files: dict[int, Any] = {rank: safe_open(folder / file_of(rank), framework="pt") for rank in ranks}
        for name, parts in layout.parts.items():
            for part in parts:
                elements = files[part.rank].get_tensor(name).view(-1)
                if (dtype_name(elements.dtype), len(elements)) != (layout.sums[name].dtype, part.count):
                    raise RuntimeError(f"{name} has {len(elements)} elements of {elements.dtype}, not {part.count}")
                yield Arrival(name, part.offset, elements)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise HeadwayError(f"{folder}: the version there is not whole ({error})") from error


def _transport(folder: Path) -> dict[str, Any]:
    return {"type": "filesystem", "path": str(folder.absolute())}


def unfinished(folder: Path) -> Path:
    """The folder that a version is written to before it gets its name; the same for all processes."""
    return folder.with_name(f".{folder.name}.partial")


def file_of(rank: int) -> str:
    """Name the file of a process."""
    return f"rank_{rank:05d}.safetensors"


def make_empty(folder: Path) -> None:
    """Make a folder, without what an interrupted process left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _release(paths: RunPaths, update: WeightUpdate, layout: Layout, keep_last: int) -> None:
    """Give a filled folder its name, and announce it."""
    folder = paths.version(update.version)
    write_atomic(unfinished(folder) / MANIFEST, msgspec.json.encode(Manifest(update.version, layout)))
    withdraw(paths, update.version)
    unfinished(folder).rename(folder)
    sync_directory(folder.parent)
    announce(paths, update, keep_last=keep_last)


def write_shards(folder: Path, rank: int, shards: Iterable[Shard]) -> RankParts:
    """Write one process's file and count it in the same pass. A whole tensor gets its own shape there."""
    fingerprint, held = Fingerprint(), list(shards)
    parts = {shard.name: Part(rank, 0, 0, shard.offset, shard.tensor.numel()) for shard in held}
    if held:
        with tensor_file(folder / file_of(rank), held) as places:
            for shard in held:
                place = places[shard.name]
                fingerprint.add(shard.name, shard.tensor, shard.offset, shard.shape, shard.dtype, copy=place)
            fingerprint.wait()
    return RankParts(fingerprint.shards(), parts, [sum(shard.nbytes for shard in held)] if held else [])


@contextmanager
def tensor_file(path: Path, shards: Iterable[Shard]) -> Iterator[dict[str, Tensor]]:
    """Make a safetensors file that is filled in place: yields the bytes of each tensor, to be written to until the
    context ends.

    Raises OSError where the disk is full: mapped memory of a file that cannot grow must not be written to.
    """
    # Widest elements first: then all are aligned.
    ordered = sorted(shards, key=lambda shard: (-shard.dtype.itemsize, shard.name))
    header, ranges = _header(ordered)
    size = len(header) + sum(shard.nbytes for shard in ordered)
    with path.open("w+b") as file:
        reserve(file, size)
        memory = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    memory[: len(header)] = header
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    yield {name: whole[len(header) + begin : len(header) + end] for name, (begin, end) in ranges.items()}


def _header(shards: list[Shard]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The beginning of a safetensors file, and each tensor's range in the bytes that follow."""
    table, ranges, at = {}, {}, 0
    for shard in shards:
        if shard.dtype not in _DTYPES:
            raise HeadwayError(f"{shard.name}: safetensors files do not hold {shard.dtype}")
        ranges[shard.name] = (at, at + shard.nbytes)
        shape = shard.shape if shard.whole else tuple(shard.tensor.shape)
        table[shard.name] = {"dtype": _DTYPES[shard.dtype], "shape": shape, "data_offsets": ranges[shard.name]}
        at += shard.nbytes
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, ranges
