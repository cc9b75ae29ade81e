"""Weights over a shared filesystem: one safetensors file per rank in a folder per version, announced last."""

import shutil
import struct
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.config.shared import FilesystemWeights
from headway.core.errors import HeadwayError
from headway.core.files import sync_directory, write_atomic
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.weights.announce import announce, announced, withdraw
from headway.transport.weights.base import NamedTensors
from headway.transport.weights.fingerprint import Fingerprint, TensorSum
from headway.transport.weights.shards import Shard, rank_and_ranks, shards

MANIFEST = "manifest.json"


class Part(msgspec.Struct, frozen=True):
    """`count` elements of a tensor from flat index `offset` on, under its name in `file`."""

    file: str
    offset: int
    count: int


class Manifest(msgspec.Struct):
    """What a version's folder holds. `sums` are the tensors' shares of the fingerprint."""

    version: int
    fingerprint: str
    sums: dict[str, TensorSum]
    parts: dict[str, list[Part]]


class FilesystemSender:
    """Every rank writes its own shards; rank 0 only gathers what they are called.

    A version is not flushed to disk before it is announced: after a crash of the host the trainer publishes
    again from its checkpoint, and a receiver proves what it read by the fingerprint.
    """

    def __init__(self, settings: FilesystemWeights, paths: RunPaths, policy: str = "policy") -> None:
        self._paths = paths
        self._policy = policy
        self._keep = max(settings.keep_last, 2)
        """The version before the newest always stays: an engine may be reading it."""

    def publish(self, version: int, tensors: NamedTensors, adapter: str | None = None) -> WeightUpdate:
        rank, ranks = rank_and_ranks()
        folder = self._paths.version(version)
        aside = folder.with_name(f".{folder.name}.partial")
        _on_rank_zero(rank, ranks, lambda: _clear(aside))
        fingerprint, parts = Fingerprint(), dict[str, Part]()
        held: dict[str, Tensor] = {}
        for shard in shards(tensors, rank, ranks):
            fingerprint.add(shard.name, shard.tensor, shard.offset, shard.shape)
            held[shard.name] = _to_file(shard)
            parts[shard.name] = Part(f"rank_{rank:05d}.safetensors", shard.offset, shard.tensor.numel())
        if held:
            save_file(held, aside / f"rank_{rank:05d}.safetensors")
        mine = (fingerprint.sums(), parts)
        everyone = [mine]
        if ranks > 1:
            everyone = [mine] * ranks
            dist.all_gather_object(everyone, mine)
        manifest = _manifest(version, everyone)
        transport = {"type": "filesystem", "path": str(folder.absolute())}
        update = WeightUpdate(version, manifest.fingerprint, transport, policy=self._policy, adapter=adapter)
        _on_rank_zero(rank, ranks, lambda: self._release(aside, folder, manifest, update))
        return update

    def close(self) -> None:
        """Published versions stay: engines that start later read them."""

    def _release(self, aside: Path, folder: Path, manifest: Manifest, update: WeightUpdate) -> None:
        write_atomic(aside / MANIFEST, msgspec.json.encode(manifest))
        if folder.exists():
            withdraw(self._paths, update.version)
            shutil.rmtree(folder)
        aside.rename(folder)
        sync_directory(folder.parent)
        announce(self._paths, update)
        for version in announced(self._paths)[: -self._keep]:
            withdraw(self._paths, version)
            shutil.rmtree(self._paths.version(version), ignore_errors=True)


class FilesystemReceiver:
    """Reads a version's folder, whole tensors stitched from the ranks' rows. Files are mapped, not copied."""

    def receive(self, update: WeightUpdate) -> Iterator[tuple[str, Tensor]]:
        folder = Path(update.transport["path"])
        manifest = read_manifest(folder)
        if manifest.fingerprint != update.fingerprint:
            raise HeadwayError(f"{folder} holds {manifest.fingerprint}, not the announced {update.fingerprint}")
        try:
            yield from _read(folder, manifest)
        except (OSError, SafetensorError, KeyError, struct.error) as error:
            raise HeadwayError(f"{folder}: version {update.version} is not whole ({error})") from error

    def close(self) -> None: ...


def read_manifest(folder: Path) -> Manifest:
    """Raises HeadwayError where `folder` is not a published version."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise HeadwayError(f"{folder}: no published version there ({error})") from None


def _read(folder: Path, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    files: dict[str, Any] = {}
    for parts in manifest.parts.values():
        for part in parts:
            if part.file not in files:
                files[part.file] = safe_open(folder / part.file, framework="pt")
    for name, parts in manifest.parts.items():
        whole = manifest.sums[name]
        if len(parts) == 1:
            yield name, files[parts[0].file].get_tensor(name).view(whole.shape)
            continue
        if sum(part.count for part in parts) != prod(whole.shape):
            raise HeadwayError(f"{folder}: the parts of {name} do not add up to {whole.shape}")
        out = torch.empty(prod(whole.shape), dtype=getattr(torch, whole.dtype))
        for part in parts:
            out[part.offset : part.offset + part.count] = files[part.file].get_tensor(name).view(-1)
        yield name, out.view(whole.shape)


def _manifest(version: int, everyone: list[tuple[dict[str, TensorSum], dict[str, Part]]]) -> Manifest:
    fingerprint, parts = Fingerprint(), dict[str, list[Part]]()
    for sums, theirs in everyone:
        fingerprint.merge_sums(sums)
        for name, part in theirs.items():
            parts.setdefault(name, []).append(part)
    return Manifest(version, fingerprint.hexdigest(), fingerprint.sums(), parts)


def _to_file(shard: Shard) -> Tensor:
    tensor = shard.tensor.contiguous().cpu()
    return tensor.view(shard.shape) if shard.whole else tensor


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _on_rank_zero(rank: int, ranks: int, work: Callable[[], None]) -> None:
    """Rank 0 works while the others wait, and learn it if that failed."""
    failure: str | None = None
    if rank == 0:
        try:
            work()
        except OSError as error:
            failure = str(error)
    if ranks > 1:
        box = [failure]
        dist.broadcast_object_list(box, src=0)
        failure = box[0]
    if failure is not None:
        raise HeadwayError(f"cannot publish weights: {failure}")
