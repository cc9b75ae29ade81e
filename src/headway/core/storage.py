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

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import atomic_directory

MANIFEST = "MANIFEST.json"


class StorageError(HeadwayError):
    """The storage could not be reached, or refused."""


class DamagedCopyError(StorageError):
    """A copy is not what was stored."""


class _File(msgspec.Struct):
    size: int
    sha256: str


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
        manifest: dict[str, _File] = {}
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            relative = file.relative_to(folder).as_posix()
            with self._asking():
                self._files.makedirs(f"{self._root}/{name}/{relative}".rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(file), f"{self._root}/{name}/{relative}")
            manifest[relative] = _describe(file)
        self.write(f"{name}/{MANIFEST}", msgspec.json.encode(manifest))

    def download(self, name: str, folder: Path) -> None:
        """Copy a whole folder here, where it appears when all of it has come. Raises DamagedCopyError."""
        try:
            manifest = msgspec.json.decode(self.read(f"{name}/{MANIFEST}") or b"", type=dict[str, _File])
        except msgspec.DecodeError as error:
            raise DamagedCopyError(f"{self.url}/{name}: its manifest cannot be read: {error}") from None
        with atomic_directory(folder) as aside:
            for relative, described in manifest.items():
                file = aside / relative
                if not file.resolve().is_relative_to(aside.resolve()):
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


def _describe(file: Path) -> _File:
    with file.open("rb") as content:
        return _File(file.stat().st_size, hashlib.file_digest(content, "sha256").hexdigest())
