"""Weights over a shared filesystem: one safetensors file per rank in a folder per version, announced last."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.config.shared import FilesystemWeights
from headway.core.errors import HeadwayError
from headway.core.files import sync_directory, write_atomic
from headway.core.protocol import WeightProbe, WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.weights.announcements import announce, announced, withdraw
from headway.transport.weights.base import NamedTensors
from headway.transport.weights.fingerprint import Fingerprint, TensorSum, dtype_name
from headway.transport.weights.layout import Arrival, Layout, Part, RankParts, gather_layout
from headway.transport.weights.mappings import Mappings
from headway.transport.weights.ranks import on_rank_zero, rank_and_ranks
from headway.transport.weights.shards import Shard, shards
from headway.transport.weights.tensor_file import Entry, tensor_file

MANIFEST = "manifest.json"


class Manifest(msgspec.Struct):
    """What a version's folder holds: the tensors lie under their names in the files of the ranks."""

    version: int
    layout: Layout


class FilesystemSender:
    """Every rank writes its own shards; only names and sums are gathered.

    A version is not flushed to disk before it is announced: after a crash of the host the trainer publishes
    again from its checkpoint, and a receiver proves what it read by the fingerprint.
    """

    def __init__(self, settings: FilesystemWeights, paths: RunPaths, policy: str = "policy") -> None:
        self._paths = paths
        self._policy = policy
        self._keep = settings.keep_last

    def publish(
        self,
        version: int,
        tensors: NamedTensors,
        adapter: str | None = None,
        probe: WeightProbe | None = None,
        dtype: torch.dtype | None = None,
    ) -> WeightUpdate:
        rank, ranks = rank_and_ranks()
        folder = self._paths.version(version)
        on_rank_zero(lambda: _clear(aside(folder)))
        mine = write_shards(aside(folder), rank, shards(tensors, rank, ranks, dtype))
        layout = gather_layout(mine, ranks)
        update = WeightUpdate(
            version, layout.fingerprint, transport_of(folder), policy=self._policy, adapter=adapter, probe=probe
        )
        on_rank_zero(lambda: release(self._paths, layout, update, self._keep))
        return update

    def close(self) -> None:
        """Published versions stay: engines that start later read them."""


def fetch(update: WeightUpdate, _mappings: Mappings) -> tuple[Layout, Iterator[Arrival]]:
    """What a version's folder holds. Files are mapped, not copied."""
    folder = Path(update.transport["path"])
    layout = read_manifest(folder).layout
    return layout, _read(folder, layout)


def transport_of(folder: Path) -> dict[str, Any]:
    return {"type": "filesystem", "path": str(folder.absolute())}


def aside(folder: Path) -> Path:
    """Where a version's folder is filled before it gets its name; the same for all ranks."""
    return folder.with_name(f".{folder.name}.partial")


def write_shards(folder: Path, rank: int, mine: Iterable[Shard]) -> RankParts:
    """Write one rank's file, counted on the way, under a whole tensor's own shape where a shard is one."""
    fingerprint, held = Fingerprint(), list(mine)
    parts = {shard.name: Part(rank, 0, 0, shard.offset, shard.tensor.numel()) for shard in held}
    if held:
        with tensor_file(folder / _file(rank), [_entry(shard) for shard in held]) as places:
            for shard in held:
                place = places[shard.name]
                fingerprint.add(shard.name, shard.tensor, shard.offset, shard.shape, shard.dtype, copy=place)
            fingerprint.settle()
    return RankParts(fingerprint.parts(), parts, [sum(shard.nbytes for shard in held)] if held else [])


def _entry(shard: Shard) -> Entry:
    tensor = shard.tensor
    return shard.name, shard.dtype, shard.shape if shard.whole else tuple(tensor.shape), shard.nbytes


def release(paths: RunPaths, layout: Layout, update: WeightUpdate, keep_last: int) -> None:
    """Give a filled folder its name, announce it, and clean up after older and abandoned versions.

    The version before the newest always stays: an engine may be reading it.
    """
    folder = paths.version(update.version)
    write_atomic(aside(folder) / MANIFEST, msgspec.json.encode(Manifest(update.version, layout)))
    withdraw(paths, update.version)
    aside(folder).rename(folder)
    sync_directory(folder.parent)
    announce(paths, update)
    for version in announced(paths)[: -max(keep_last, 2)]:
        withdraw(paths, version)


def read_manifest(folder: Path) -> Manifest:
    """Raises HeadwayError where `folder` is not a published version."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise HeadwayError(f"{folder}: no published version there ({error})") from None


def _read(folder: Path, layout: Layout) -> Iterator[Arrival]:
    try:
        ranks = {part.rank for parts in layout.parts.values() for part in parts}
        files: dict[int, Any] = {rank: safe_open(folder / _file(rank), framework="pt") for rank in ranks}
        for name, parts in layout.parts.items():
            for part in parts:
                elements = files[part.rank].get_tensor(name).view(-1)
                _check(name, elements, part, layout.sums[name])
                yield Arrival(name, part.offset, elements)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise HeadwayError(f"{folder}: the version there is not whole ({error})") from error


def _check(name: str, elements: Tensor, part: Part, whole: TensorSum) -> None:
    if (dtype_name(elements.dtype), len(elements)) != (whole.dtype, part.count):
        raise RuntimeError(f"{name} has {len(elements)} elements of {elements.dtype} where {part.count} were written")


def _file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
