"""The engines of a run: a file for each, in a folder that processes of several hosts may share."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from headway.core.files import write_atomic

_SETTLED_SECONDS = 2.0
"""Time without a change after which the next one is sure to give the folder another time of change."""

_Stamp = tuple[int, int]


class _Joined(msgspec.Struct):
    url: str


class EngineFiles:
    """Adds, removes and lists engines. An orchestrator lists them several times a second, and of hundreds that takes
    milliseconds; so files are read again only after the folder has changed."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._changed: tuple[_Stamp | None, float] = None, 0.0
        self._settled: tuple[_Stamp | None, dict[str, str]] | None = None

    def add(self, name: str, url: str, pid: int) -> None:
        """Put an engine into the list. The list outlives no crash of the host, and neither do its engines."""
        write_atomic(self._folder / f"{name}.json", msgspec.json.encode({"url": url, "pid": pid}), durable=False)

    def remove(self, name: str) -> None:
        (self._folder / f"{name}.json").unlink(missing_ok=True)

    def urls(self) -> dict[str, str]:
        """Return the base URLs of the engines by name, in the order of names."""
        stamp, now, settled = self._folder_stamp(), self._clock(), self._settled
        if settled is not None and settled[0] == stamp:
            return settled[1].copy()
        known, since = self._changed
        if known != stamp:
            self._changed = stamp, now
        found = self._read()
        # A change right after this one may leave the stamp as it is: clocks of file systems tick in milliseconds.
        if known == stamp and now - since > _SETTLED_SECONDS:
            self._settled = stamp, found.copy()
        return found

    def _folder_stamp(self) -> _Stamp | None:
        """Return what changes with the list. The folder is opened for it: on a network's disk that asks the server,
        where a stat alone would be answered from a cache that is up to a minute old."""
        try:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        try:
            about = os.fstat(folder)
        finally:
            os.close(folder)
        return about.st_ino, about.st_mtime_ns

    def _read(self) -> dict[str, str]:
        found = {}
        for file in sorted(self._folder.glob("*.json")):
            try:
                found[file.stem] = msgspec.json.decode(file.read_bytes(), type=_Joined).url.rstrip("/")
            except (OSError, msgspec.DecodeError):
                continue  # it is leaving, or someone else's; an engine writes its file whole
        return found
