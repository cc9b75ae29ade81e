"""Versions on disk as shards: what a source serves, a relay passes on, and a worker assembles."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from headway.base.errors import HeadwayError
from headway.base.files import atomic_directory, write_atomic
from headway.swarm.messages.keys import Signed, SigningKey
from headway.swarm.weights.manifest import (
    AdapterTerms,
    HashedFolder,
    VersionNotice,
    WeightManifest,
    make_manifest,
    open_manifest,
    read_shards,
    write_file,
)

_VERSION = re.compile(r"v(\d{6,})")


class ShardStore:
    """A folder of versions. Only manifests that the run's `key` signed and shards that fit them get in.

    A version that was begun goes on where it was after a break: each shard is a file of its own. Of one that was
    assembled only its files are left. What versions have in common is taken from those that are here: shards and whole
    files as further links to the same bytes, so that they take room once, and shards inside of files as copies.
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
        if self.files(version).is_dir():
            return []
        return [
            index
            for name, indices in manifest.shards_by_file()
            if not self._linked(version, name).is_file()
            for index in indices
            if not self.shard(version, index).is_file()
        ]

    def adopt(self, version: int) -> None:
        """Take from the other versions here what they have in common with this one."""
        manifest = self.manifest(version)
        assert manifest is not None
        if not self.missing(version):
            return
        for other in reversed(self.versions()):
            if other != version and (known := self.manifest(other)) is not None:
                # It may be removed meanwhile, or the disk may have no links: what is still missing is fetched.
                with suppress(OSError):
                    self._adopt_files(manifest, known)
                    self._adopt_shards(manifest, known)

    def put(self, version: int, index: int, data: bytes) -> bool:
        """Keep a shard if it is the one that the manifest names."""
        manifest = self.manifest(version)
        if manifest is None or not manifest.is_shard(index, data):
            return False
        write_atomic(self.shard(version, index), data, durable=False)
        return True

    def shard(self, version: int, index: int) -> Path:
        return self._of(version) / "shards" / f"{index:06d}"

    def files(self, version: int) -> Path:
        """Return the folder with the files of a version, which is there once it was assembled."""
        return self._of(version) / "files"

    def assemble(self, version: int) -> Path:
        """Write the files of a whole version to their folder, which appears at once, and drop its shards. Shards are
        verified once more: the disk may have changed them. Files of older versions are not, since an engine verifies
        the tensors that it loads from them."""
        manifest = self.manifest(version)
        assert manifest is not None
        if self.files(version).is_dir():
            return self.files(version)
        with atomic_directory(self.files(version)) as aside:
            for name, indices in manifest.shards_by_file():
                if (linked := self._linked(version, name)).is_file():
                    _link(linked, aside / name)
                else:
                    write_file(aside / name, self._verified(manifest, indices))
        shutil.rmtree(self._of(version) / "linked", ignore_errors=True)
        shutil.rmtree(self._of(version) / "shards", ignore_errors=True)
        return self.files(version)

    def remove(self, version: int) -> None:
        self._manifests.pop(version, None)
        shutil.rmtree(self._of(version), ignore_errors=True)

    def keep(self, newest: int, count: int) -> None:
        """Drop all versions except the last `count` up to `newest`."""
        for version in self.versions():
            if not newest - count < version <= newest:
                self.remove(version)

    def _adopt_files(self, manifest: WeightManifest, known: WeightManifest) -> None:
        """Link files of an assembled version that are the same here."""
        theirs = {name: known.hashes[indices.start : indices.stop] for name, indices in known.shards_by_file()}
        folder = self.files(known.version)
        for name, indices in manifest.shards_by_file():
            same = theirs.get(name) == manifest.hashes[indices.start : indices.stop]
            if same and (folder / name).is_file() and not self._linked(manifest.version, name).is_file():
                _link(folder / name, self._linked(manifest.version, name))

    def _adopt_shards(self, manifest: WeightManifest, known: WeightManifest) -> None:
        """Link shards of another version, or copy them from its files, that are the same here."""
        wanted: dict[bytes, list[int]] = {}
        for index in self.missing(manifest.version):
            wanted.setdefault(manifest.hashes[index], []).append(index)
        for name, indices in known.shards_by_file():
            path, at = self.files(known.version) / name, 0
            for index in indices:
                for target in wanted.get(known.hashes[index], ()):
                    if (held := self.shard(known.version, index)).is_file():
                        _link(held, self.shard(manifest.version, target))
                    elif path.is_file():
                        self.put(manifest.version, target, _read(path, at, known.sizes[index]))
                at += known.sizes[index]

    def _verified(self, manifest: WeightManifest, indices: range) -> Iterator[bytes]:
        for index in indices:
            path = self.shard(manifest.version, index)
            if not manifest.is_shard(index, data := path.read_bytes()):
                path.unlink()
                raise OSError(f"shard {index} of version {manifest.version} is damaged on disk and is fetched again")
            yield data

    def _linked(self, version: int, name: str) -> Path:
        return self._of(version) / "linked" / name

    def _of(self, version: int) -> Path:
        return self._folder / f"v{version:06d}"


def _link(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.link(path, target)


def _read(path: Path, at: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(size)


def publish_folder(
    store: ShardStore,
    key: SigningKey,
    run: str,
    version: int,
    fingerprint: str,
    folder: Path,
    *,
    adapter: AdapterTerms | None = None,
    before: HashedFolder | None = None,
) -> WeightManifest:
    """Cut a version's folder into shards, sign its manifest, and put both into the store. `before` is the folder of an
    older version, which may share files with this one."""
    manifest = make_manifest(run, version, fingerprint, folder, adapter=adapter, before=before)
    signed: Signed = key.sign(manifest)
    store.add(msgspec.msgpack.encode(signed))
    store.adopt(version)
    missing = set(store.missing(version))
    for name, indices in manifest.shards_by_file():
        if missing.isdisjoint(indices):
            continue
        shards = read_shards(folder / name, [manifest.sizes[index] for index in indices])
        for index, data in zip(indices, shards, strict=True):
            if index in missing and not store.put(version, index, data):
                raise HeadwayError(f"{folder / name} was changed while version {version} was published")
    return manifest
