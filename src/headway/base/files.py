"""Files that appear whole or not at all: write aside, fsync, rename."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_CHUNK = 1 << 20


def write_atomic(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """Replace `path` by `data`. A reader sees the old content or the new, never a part.

    What is not `durable` is not flushed to disk: it may be lost, or empty, after the host crashed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a folder to fill; it becomes `path` on success and vanishes on failure.

    An existing `path` is replaced, so that redoing interrupted work is always allowed: it is moved away first, and a
    crash between the two renames leaves no `path`, never a mixture.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    aside.mkdir()
    try:
        yield aside
        for entry in (aside, *aside.rglob("*")):
            if not entry.is_symlink():
                _sync(entry)
        if path.exists():
            doomed = path.with_name(f".{path.name}.{uuid.uuid4().hex}.old")
            path.rename(doomed)
            aside.rename(path)
            shutil.rmtree(doomed, ignore_errors=True)
        else:
            aside.rename(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_directory(path.parent)


def reserve(file: IO[bytes], size: int) -> None:
    """Give an empty file its size and its place on the disk. Raises OSError where the disk is full.

    Otherwise a full disk shows only when mapped memory of the file is written to, by a signal that ends the process.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for start in range(0, size, _CHUNK):  # as on macOS
        file.write(bytes(min(_CHUNK, size - start)))
    file.flush()


def sync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
