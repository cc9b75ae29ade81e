"""Metrics and logs that members on other hosts send: copies of growing files in the run's own folder."""

import re

from headway.base.files import write_atomic
from headway.core.runs import RunPaths

_NAME = re.compile(r"\w[\w.-]{0,150}\.(log|jsonl)")
FOLDERS = ("metrics", "logs")


class CollectedFiles:
    """Files of the run's metrics and logs, read and written at offsets, so that a sender may begin again anywhere."""

    def __init__(self, paths: RunPaths) -> None:
        self._folders = {"metrics": paths.metrics, "logs": paths.logs}

    def sizes(self, folder: str) -> dict[str, int]:
        self._check(folder)
        return {
            entry.name: entry.stat().st_size
            for entry in sorted(self._folders[folder].glob("*"))
            if _NAME.fullmatch(entry.name)
        }

    def read(self, folder: str, name: str, offset: int, limit: int) -> bytes:
        """Return up to `limit` bytes from `offset` on, counted from the end where it is negative."""
        self._check(folder, name)
        try:
            with (self._folders[folder] / name).open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size + offset) if offset < 0 else min(offset, size))
                return file.read(limit)
        except FileNotFoundError:
            raise ValueError(f"no {folder}/{name} in this run") from None

    def write(self, folder: str, name: str, offset: int, data: bytes) -> int:
        """Put `data` at `offset`, dropping what was there, and return the file's size.

        Where the file is shorter than `offset` nothing is written: the sender goes on at the size it is told.
        """
        self._check(folder, name)
        if offset < 0:
            raise ValueError("an offset is not negative")
        path = self._folders[folder] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        size = path.stat().st_size if path.exists() else 0
        if size < offset:
            return size
        if size > offset:
            # Replaced, not cut: whoever follows the file sees that it is another one, and does not read on mid-line.
            with path.open("rb") as file:
                kept = file.read(offset)
            write_atomic(path, kept)
        with path.open("ab") as file:
            file.write(data)
            return file.tell()

    def _check(self, folder: str, name: str | None = None) -> None:
        if folder not in FOLDERS or (name is not None and not _NAME.fullmatch(name)):
            raise ValueError("files are those of metrics and logs, NAME.jsonl and NAME.log")
