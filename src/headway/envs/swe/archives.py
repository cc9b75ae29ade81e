"""Archives of repositories: files by path, packed so that equal files give equal bytes."""

import gzip
import hashlib
import io
import posixpath
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headway.base.errors import UsageError

MAX_BYTES = 64 << 20
"""All files of a repository together."""
_LEFT_OUT = {".git", "__pycache__", ".tox", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache"}


class File(NamedTuple):
    """The content of a file, and if it is a program."""

    data: bytes
    executable: bool = False


Files = Mapping[str, File]
"""Files by path, relative to the repository, with "/" between folders. Links and empty folders are none."""


def pack(files: Files) -> bytes:
    """Write a tar archive that depends on the files alone: sorted, without times and owners."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in sorted(files):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(files[path].data), 0o755 if files[path].executable else 0o644
            archive.addfile(entry, io.BytesIO(files[path].data))
    return packed.getvalue()


def unpack(data: bytes) -> dict[str, File]:
    """Read the plain files of a tar archive, compressed or not, into memory; nothing is written to disk.

    Raises UsageError for one that is broken, larger than MAX_BYTES, or names files outside of itself.
    """
    files: dict[str, File] = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for entry in archive:
                if not entry.isreg():
                    continue
                total += entry.size
                if total > MAX_BYTES:
                    raise UsageError(f"the archive holds more than {MAX_BYTES >> 20} MiB")
                reader = archive.extractfile(entry)
                assert reader is not None
                files[_inside(entry.name)] = File(reader.read(), bool(entry.mode & 0o100))
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise UsageError(f"not a readable archive: {error}") from error
    return files


def read_source(path: Path) -> dict[str, File]:
    """Read a repository: a folder, or an archive (.tar.gz, .zip) whose one top folder is left off."""
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise UsageError(f"{path}: there is no such folder or archive")
    files = _read_zip(path) if path.suffix in (".zip", ".whl") else unpack(path.read_bytes())
    tops = {name.partition("/")[0] for name in files}
    if len(tops) == 1 and all("/" in name for name in files):
        files = {name.partition("/")[2]: file for name, file in files.items()}
    return {name: file for name, file in files.items() if not _LEFT_OUT & set(name.split("/"))}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def compress(data: bytes) -> bytes:
    return gzip.compress(data, 6, mtime=0)


def _read_folder(folder: Path) -> dict[str, File]:
    files: dict[str, File] = {}
    total = 0
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not path.is_file() or _LEFT_OUT & set(name.split("/")) or path.suffix == ".pyc":
            continue
        files[name] = File(path.read_bytes(), bool(path.stat().st_mode & 0o100))
        total += len(files[name].data)
        if total > MAX_BYTES:
            raise UsageError(f"{folder} holds more than {MAX_BYTES >> 20} MiB")
    return files


def _read_zip(path: Path) -> dict[str, File]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            if sum(entry.file_size for entry in entries) > MAX_BYTES:
                raise UsageError(f"{path} holds more than {MAX_BYTES >> 20} MiB")
            return {_inside(entry.filename): File(archive.read(entry)) for entry in entries}
    except (zipfile.BadZipFile, OSError) as error:
        raise UsageError(f"{path} is not a readable archive: {error}") from error


def _inside(name: str) -> str:
    path = posixpath.normpath(name)
    if path.startswith(("/", "../")) or path in (".", ".."):
        raise ValueError(f"it names {name!r}, which lies outside of it")
    return path
