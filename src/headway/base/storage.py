"""Storage elsewhere: a folder, or any URL that fsspec knows, which folders are copied to and come back from whole.

A copied folder gets a manifest last, with the size and the hash of each of its files. Without one the copy is
half-written, and nobody reads it.
"""

import hashlib
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headway.base.errors import HeadwayError, UsageError
from headway.base.files import atomic_directory

MANIFEST = "MANIFEST.json"


class StorageError(HeadwayError):
    """The storage could not be reached, or refused."""


class DamagedCopyError(StorageError):
    """A copy is not what was stored."""


class FileDescription(msgspec.Struct):
    """A stored file, as a manifest describes it."""

    size: int
    sha256: str


Manifest = dict[str, FileDescription]
"""The files of a stored folder, by name."""


def is_url(text: str) -> bool:
    return "://" in text


class Storage:
    """Folders below one URL, by name: whole or not there. Names may have slashes."""

    def __init__(self, url: str) -> None:
        """Raise UsageError where fsspec does not know the URL, or lacks the package for it."""
        self.url = url.rstrip("/")
        try:
            # By name, so that checks of types need nothing of it.
            self._files, self._root = importlib.import_module("fsspec.core").url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{url} is not a place for files: {error}") from None

    def names(self, parent: str) -> list[str]:
        """Return the names of the whole folders in `parent`, in order."""
        with self._asking():
            self._files.invalidate_cache()
            below = self._files.glob(f"{self._root}/{parent}/*/{MANIFEST}")
        return sorted(str(path).rpartition("/")[0].rpartition("/")[2] for path in below)

    def upload(self, folder: Path, name: str) -> None:
        """Copy a folder. A copy of that name is replaced, and is not whole meanwhile."""
        self.remove(name)
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        self.finish(name, self.upload_files(folder, name, files))

    def upload_files(self, folder: Path, name: str, files: list[str]) -> Manifest:
        """Copy some files of a folder, of which others may upload the rest; `finish` makes it whole."""
        manifest: Manifest = {}
        for relative in files:
            with self._asking():
                self._files.makedirs(f"{self._root}/{name}/{relative}".rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(folder / relative), f"{self._root}/{name}/{relative}")
            manifest[relative] = _describe(folder / relative)
        return manifest

    def finish(self, name: str, manifest: Manifest) -> None:
        """Make a folder whole whose files are all there."""
        self.write(f"{name}/{MANIFEST}", msgspec.json.encode(manifest))

    def download(self, name: str, folder: Path) -> None:
        """Copy a whole folder here, where it appears when all of it has come. Raises DamagedCopyError."""
        manifest = self.manifest(name)
        with atomic_directory(folder) as aside:
            self.download_files(name, aside, manifest)

    def manifest(self, name: str) -> Manifest:
        """Return the description of a whole folder. Raises DamagedCopyError."""
        try:
            return msgspec.json.decode(self.read(f"{name}/{MANIFEST}") or b"", type=Manifest)
        except msgspec.DecodeError as error:
            raise DamagedCopyError(f"{self.url}/{name}: its manifest cannot be read: {error}") from None

    def download_files(self, name: str, folder: Path, files: Manifest) -> None:
        """Copy some files of a stored folder into `folder`, in this order. Raises DamagedCopyError."""
        for relative, described in files.items():
            file = folder / relative
            if not file.resolve().is_relative_to(folder.resolve()):
                raise DamagedCopyError(f"{self.url}/{name}: its manifest names {relative}, which is outside")
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                with self._asking():
                    self._files.get_file(f"{self._root}/{name}/{relative}", str(file))
            except FileNotFoundError:
                raise DamagedCopyError(f"{self.url}/{name}: {relative} is missing") from None
            if _describe(file) != described:
                raise DamagedCopyError(f"{self.url}/{name}: {relative} is not what was stored")

    def remove(self, name: str) -> None:
        """Remove a folder, its manifest first."""
        with self._asking():
            for path in (f"{self._root}/{name}/{MANIFEST}", f"{self._root}/{name}"):
                if self._files.exists(path):
                    self._files.rm(path, recursive=True)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None where there is none."""
        try:
            with self._asking():
                return bytes(self._files.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        with self._asking():
            self._files.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(f"{self._root}/{name}", data)

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        """Turn what the storage's own client raises, which may be anything, into an error that names the place."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            raise StorageError(f"{self.url}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def _describe(file: Path) -> FileDescription:
    with file.open("rb") as content:
        return FileDescription(file.stat().st_size, hashlib.file_digest(content, "sha256").hexdigest())
