"""The manifest of a weight version: which files it has, and the hash of every fixed-size shard of them."""

import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import msgspec

from headway.core.errors import HeadwayError
from headway.swarm.canonical import InvalidMessageError
from headway.swarm.keys import Signed, open_signed

SMALLEST_SHARD, LARGEST_SHARD = 1 << 20, 64 << 20
MANY_SHARDS = 8192
"""Shards of a version above which they become larger: small ones travel through relays sooner, and each costs a
request and 32 bytes of the manifest."""
LONGEST_MANIFEST = 16 << 20
"""Bytes of a signed manifest: 64 for each shard, so that 1 TB in the smallest shards fits."""
_FILE = re.compile(r"[\w][\w.-]{0,99}")


class VersionFile(msgspec.Struct, frozen=True):
    """A file of a version's folder, and its size in bytes."""

    name: str
    size: int


class WeightManifest(msgspec.Struct, frozen=True):
    """One version of a run's weights, as a folder that an engine loads: config, tokenizer and tensors.

    The files, one after the other, are cut into shards of `shard_bytes` (the last may be shorter); `hashes` are their
    SHA-256. `fingerprint` is that of the tensors, the same that the trainer announced. The run signs it.
    """

    run: str
    version: int
    fingerprint: str
    shard_bytes: int
    files: tuple[VersionFile, ...]
    hashes: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def shard_size(self, index: int) -> int:
        return min(self.shard_bytes, self.size - index * self.shard_bytes)

    def is_shard(self, index: int, data: bytes) -> bool:
        """Tell if `data` are the bytes of this shard."""
        return len(data) == self.shard_size(index) and sha256(data).digest() == self.hashes[index]


class VersionNotice(msgspec.Struct, frozen=True):
    """The newest version that a source serves, -1 for none, and the oldest that it still has."""

    newest: int
    oldest: int


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
    if manifest.version < 0 or any(file.size < 0 for file in manifest.files):
        raise InvalidMessageError("a manifest with a negative number")
    if not 1 <= manifest.shard_bytes <= LARGEST_SHARD:
        raise InvalidMessageError(f"a manifest with shards of {manifest.shard_bytes} bytes")
    if len(manifest.hashes) != -(-manifest.size // manifest.shard_bytes):
        raise InvalidMessageError("a manifest whose shards are not as many as its files need")


def make_manifest(
    run: str, version: int, fingerprint: str, folder: Path, shard_bytes: int | None = None
) -> WeightManifest:
    """Describe the files in `folder`, in the order of their names."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    files = tuple(VersionFile(path.name, path.stat().st_size) for path in paths)
    shard_bytes = shard_bytes or fitting_shard(sum(file.size for file in files))
    hashes = tuple(sha256(shard).digest() for shard in cut(folder, files, shard_bytes))
    return WeightManifest(run, version, fingerprint, shard_bytes, files, hashes)


def fitting_shard(size: int) -> int:
    """Return the bytes of a shard of a version of `size` bytes."""
    shard = SMALLEST_SHARD
    while shard < LARGEST_SHARD and size > shard * MANY_SHARDS:
        shard *= 2
    return shard


def cut(folder: Path, files: tuple[VersionFile, ...], shard_bytes: int) -> Iterator[bytes]:
    """Yield the shards of these files."""
    rest = b""
    for file in files:
        with (folder / file.name).open("rb") as opened:
            while data := opened.read(shard_bytes - len(rest)):
                rest += data
                if len(rest) == shard_bytes:
                    yield rest
                    rest = b""
    if rest:
        yield rest


def join(shards: Iterator[bytes], files: tuple[VersionFile, ...], folder: Path) -> None:
    """Write the files of a version from its shards, in order. Raises HeadwayError where shards are missing."""
    rest = b""
    for file in files:
        left = file.size
        with (folder / file.name).open("wb") as opened:
            while left:
                if not rest and not (rest := next(shards, b"")):
                    raise HeadwayError(f"shards of {file.name} are missing")
                opened.write(rest[:left])
                taken = min(left, len(rest))
                rest, left = rest[taken:], left - taken
