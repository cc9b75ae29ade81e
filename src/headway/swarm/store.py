"""Versions on disk as shards: what a source serves, a relay passes on, and a worker assembles."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headway.core.files import atomic_directory, write_atomic
from headway.swarm.keys import Signed, SigningKey
from headway.swarm.manifest import VersionNotice, WeightManifest, cut, join, make_manifest, open_manifest

_VERSION = re.compile(r"v(\d{6,})")


class ShardStore:
    """A folder of versions. Only manifests that the run's `key` signed and shards that fit them get in.

    A version that was begun goes on where it was after a break: each shard is a file of its own.
    """

    def __init__(self, folder: Path, key: bytes) -> None:
        self._folder, self._key = folder, key
        self._manifests: dict[int, WeightManifest] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def versions(self) -> list[int]:
        """List the versions that have a manifest, in order."""
        found = (_VERSION.fullmatch(path.parent.name) for path in self._folder.glob("v*/manifest"))
        return sorted(int(match[1]) for match in found if match)

    def notice(self) -> VersionNotice:
        versions = self.versions()
        return VersionNotice(versions[-1], versions[0]) if versions else VersionNotice(-1, -1)

    def add(self, signed: bytes) -> WeightManifest:
        """Take a signed manifest. One of the same version and other weights replaces the old and its shards. Raises
        InvalidMessageError."""
        manifest = open_manifest(signed, self._key)
        if self.manifest(manifest.version) != manifest:
            self.remove(manifest.version)
            (self._of(manifest.version) / "shards").mkdir(parents=True, exist_ok=True)
            write_atomic(self._of(manifest.version) / "manifest", signed, durable=False)
            self._manifests[manifest.version] = manifest
        return manifest

    def manifest(self, version: int) -> WeightManifest | None:
        if version not in self._manifests:
            try:
                self._manifests[version] = open_manifest(self.signed_manifest(version), self._key)
            except FileNotFoundError:
                return None
        return self._manifests[version]

    def signed_manifest(self, version: int) -> bytes:
        """Return the manifest as the run signed it. Raises FileNotFoundError."""
        return (self._of(version) / "manifest").read_bytes()

    def missing(self, version: int) -> list[int]:
        """List the shards of a version that are not here."""
        manifest = self.manifest(version)
        assert manifest is not None
        return [index for index in range(len(manifest.hashes)) if not self.shard(version, index).is_file()]

    def put(self, version: int, index: int, data: bytes) -> bool:
        """Keep a shard if it is the one that the manifest names."""
        manifest = self.manifest(version)
        if manifest is None or not manifest.is_shard(index, data):
            return False
        write_atomic(self.shard(version, index), data, durable=False)
        return True

    def shard(self, version: int, index: int) -> Path:
        return self._of(version) / "shards" / f"{index:06d}"

    def assemble(self, version: int, folder: Path) -> None:
        """Write the files of a whole version to `folder`, which appears at once, and drop its shards. Shards are
        verified once more: the disk may have changed them."""
        manifest = self.manifest(version)
        assert manifest is not None
        with atomic_directory(folder) as aside:
            join(self._verified(manifest), manifest.files, aside)
        shutil.rmtree(self._of(version) / "shards", ignore_errors=True)
        (self._of(version) / "shards").mkdir(parents=True)

    def remove(self, version: int) -> None:
        self._manifests.pop(version, None)
        shutil.rmtree(self._of(version), ignore_errors=True)

    def keep(self, newest: int, count: int) -> None:
        """Drop all versions except the last `count` up to `newest`."""
        for version in self.versions():
            if not newest - count < version <= newest:
                self.remove(version)

    def _verified(self, manifest: WeightManifest) -> Iterator[bytes]:
        for index in range(len(manifest.hashes)):
            path = self.shard(manifest.version, index)
            if not manifest.is_shard(index, data := path.read_bytes()):
                path.unlink()
                raise OSError(f"shard {index} of version {manifest.version} is damaged on disk and is fetched again")
            yield data

    def _of(self, version: int) -> Path:
        return self._folder / f"v{version:06d}"


def publish_folder(
    store: ShardStore, key: SigningKey, run: str, version: int, fingerprint: str, folder: Path
) -> WeightManifest:
    """Cut a version's folder into shards, sign its manifest, and put both into the store."""
    manifest = make_manifest(run, version, fingerprint, folder)
    signed: Signed = key.sign(manifest)
    store.add(msgspec.msgpack.encode(signed))
    for index, data in enumerate(cut(folder, manifest.files, manifest.shard_bytes)):
        store.put(version, index, data)
    return manifest
