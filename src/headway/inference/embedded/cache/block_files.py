"""KV blocks as files of a folder that several engines may share: a slower tier that outlives an engine."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from headway.base.files import write_atomic
from headway.inference.handover.records import BlockRecords

logger = logging.getLogger(__name__)

_LOOK_EVERY = 64
"""Writes after which the folder's size is looked at again: other engines write to it, too."""
_ROOM = 0.9


class BlockFiles:
    """One file per block, named by its hash, which covers weights, salt and tokens; `max_bytes` in all, oldest use
    goes first.

    A file begins with a digest of its name and content, keyed with the run's `secret`, and is not used unless it fits:
    one that is damaged, or was put there by somebody else, is as good as none. A folder that cannot be read or written
    costs speed only.
    """

    def __init__(self, folder: Path, max_bytes: int, secret: str = "") -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._records = BlockRecords(secret)
        self._writes = 0
        self._failed = False

    def write(self, name: bytes, content: Tensor) -> None:
        path = self._path(name)
        if path.exists():
            return
        data = content.numpy().tobytes()
        try:
            write_atomic(path, self._records.seal(name, data), durable=False)
            if self._writes % _LOOK_EVERY == 0:
                self._prune()
            self._writes += 1
        except OSError as error:
            if not self._failed:
                logger.warning("KV blocks cannot be kept in %s: %s; serving goes on without", self._folder, error)
            self._failed = True

    def read(self, name: bytes, size: int) -> Tensor | None:
        """Return a block of `size` bytes; None where there is none, or one that is not ours."""
        path = self._path(name)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        content = self._records.open(name, data)
        if content is None or len(content) != size:
            logger.warning("%s is damaged or of another engine and is not used; remove it", path)
            return None
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self._folder / text[:2] / f"{text}.kv"

    def _prune(self) -> None:
        """Remove the files used longest ago until there is room again."""
        found = sorted(self._files())
        total = sum(size for _, size, _ in found)
        if total <= self._max_bytes:
            return
        for _, size, path in found:
            if total <= _ROOM * self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for path in self._folder.glob("*/*.kv"):
            try:
                stat = path.stat()
            except OSError:
                continue  # another engine removed it
            yield stat.st_mtime, stat.st_size, path
