"""The manifest of a weight version: which files it has, and the hash of every shard of them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import msgspec

from headway.swarm.messages.canonical import InvalidMessageError
from headway.swarm.messages.keys import Signed, open_signed
from headway.swarm.weights.shards import LARGEST, fitting_shard, shard_sizes

LONGEST_MANIFEST = 16 << 20
"""Bytes of a signed manifest: about 40 for each shard."""
ADAPTER = "adapter"
"""The folder inside a version's folder that holds the tensors of its adapter."""
_FILE = re.compile(r"([\w][\w.-]{0,99}/)?[\w][\w.-]{0,99}")


class VersionFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a version's folder: its name, with that of a subfolder where it is in one, and its number of shards."""

    name: str
    shards: int


class AdapterTerms(msgspec.Struct, frozen=True):
    """The rank and alpha of a LoRA adapter, and the fingerprint of the base model's tensors that it is added to."""

    base: str
    rank: int
    alpha: float


class WeightManifest(msgspec.Struct, frozen=True):
    """One version of a run's weights, as a folder that an engine loads: config, tokenizer and tensors.

    Each file is cut into shards; `sizes` and `hashes`, their SHA-256, are those of all files one after the other. A
    shard that an older version has, too, has the same hash there: who holds that does not fetch it again.
    `fingerprint` is that of the trained tensors, the same that the trainer announced: where `adapter` is set, those of
    the adapter alone, and the others never change. The run signs it.
    """

    run: str
    version: int
    fingerprint: str
    files: tuple[VersionFile, ...]
    sizes: tuple[int, ...]
    hashes: tuple[bytes, ...]
    adapter: AdapterTerms | None = None

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def is_shard(self, index: int, data: bytes) -> bool:
        """Tell if `data` are the bytes of this shard."""
        return len(data) == self.sizes[index] and sha256(data).digest() == self.hashes[index]

    def shards_by_file(self) -> Iterator[tuple[str, range]]:
        """Yield the name of each file and the indices of its shards."""
        ends = accumulate(file.shards for file in self.files)
        for file, end in zip(self.files, ends, strict=True):
            yield file.name, range(end - file.shards, end)


class VersionNotice(msgspec.Struct, frozen=True):
    """The newest version that a source serves, -1 for none, and the oldest that it still has."""

    newest: int
    oldest: int


@dataclass(frozen=True, slots=True)
class HashedFolder:
    """A version's folder whose manifest is known: files that other versions share with it are not hashed again."""

    folder: Path
    manifest: WeightManifest

    def find(self, path: Path, name: str) -> list[tuple[int, bytes]] | None:
        """Return sizes and hashes of the shards of `path`, where that is the very file of this name on disk."""
        for file, indices in self.manifest.shards_by_file():
            if file == name and (self.folder / name).is_file() and path.samefile(self.folder / name):
                return [(self.manifest.sizes[index], self.manifest.hashes[index]) for index in indices]
        return None


def open_manifest(data: bytes, key: bytes) -> WeightManifest:
    """Read a manifest that the run's `key` must have signed. Raises InvalidMessageError."""
    if len(data) > LONGEST_MANIFEST:
        raise InvalidMessageError(f"a manifest of {len(data)} bytes; at most {LONGEST_MANIFEST} are taken")
    try:
        signed = msgspec.msgpack.decode(data, type=Signed)
    except msgspec.MsgspecError as error:
        raise InvalidMessageError(f"not a manifest: {error}") from None
    manifest = open_signed(WeightManifest, signed, key, LONGEST_MANIFEST)
    _check(manifest)
    return manifest


def _check(manifest: WeightManifest) -> None:
    """Refuse what would not fit into a folder: the key that signed it may be a stranger's."""
    names = [file.name for file in manifest.files]
    if not all(_FILE.fullmatch(name) for name in names) or len(set(names)) < len(names):
        raise InvalidMessageError("a manifest with names of files that are none, or twice the same")
    if manifest.version < 0 or any(file.shards < 0 for file in manifest.files):
        raise InvalidMessageError("a manifest with a negative number")
    if not all(1 <= size <= LARGEST for size in manifest.sizes):
        raise InvalidMessageError(f"a manifest with shards that are empty, or have more than {LARGEST} bytes")
    if not len(manifest.hashes) == len(manifest.sizes) == sum(file.shards for file in manifest.files):
        raise InvalidMessageError("a manifest whose shards are not as many as its files need")


def make_manifest(
    run: str,
    version: int,
    fingerprint: str,
    folder: Path,
    shard_bytes: int | None = None,
    *,
    adapter: AdapterTerms | None = None,
    before: HashedFolder | None = None,
) -> WeightManifest:
    """Describe the files in `folder`, in the order of their names. Those that are also in the folder `before` are not
    read again."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    shard_bytes = shard_bytes or fitting_shard(sum(path.stat().st_size for path in paths))
    files: list[VersionFile] = []
    shards: list[tuple[int, bytes]] = []
    for path in paths:
        name = path.relative_to(folder).as_posix()
        found = None if before is None else before.find(path, name)
        if found is None:
            cuts = shard_sizes(path, shard_bytes)
            found = [(len(data), sha256(data).digest()) for data in read_shards(path, cuts)]
        files.append(VersionFile(name, len(found)))
        shards += found
    sizes, hashes = tuple(size for size, _ in shards), tuple(hashed for _, hashed in shards)
    return WeightManifest(run, version, fingerprint, tuple(files), sizes, hashes, adapter)


def read_shards(path: Path, sizes: Sequence[int]) -> Iterator[bytes]:
    """Yield the shards of a file."""
    with path.open("rb") as opened:
        for size in sizes:
            yield opened.read(size)


def cut(folder: Path, manifest: WeightManifest) -> Iterator[bytes]:
    """Yield the shards of a version's folder."""
    for name, indices in manifest.shards_by_file():
        yield from read_shards(folder / name, [manifest.sizes[index] for index in indices])


def write_file(path: Path, shards: Iterable[bytes]) -> None:
    """Write a file of a version from its shards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as opened:
        for shard in shards:
            opened.write(shard)
