"""The engines of a run: a file for each, in a folder that processes of several hosts may share."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from headway.base.files import write_atomic

_SETTLED_SECONDS = 2.0
"""Time without a change after which the next one is sure to give the folder another time of change."""

_Stamp = tuple[int, int]


class _Joined(msgspec.Struct):
    url: str


class EngineFiles:
    """Adds, removes and lists engines. An orchestrator lists them several times a second, and to read hundreds of files
    takes 20 ms; so the folder is listed again only after it has changed, and then only files that are new are read."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._changed: tuple[_Stamp | None, float] = None, 0.0
        self._settled: tuple[_Stamp | None, dict[str, str]] | None = None
        self._known: dict[str, tuple[_Stamp, str]] = {}

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
        """List the folder. A file that an engine writes again is another one, so its stamp tells of every change."""
        known: dict[str, tuple[_Stamp, str]] = {}
        for name, stamp in self._file_stamps():
            before = self._known.get(name)
            if before is not None and before[0] == stamp:
                known[name] = before
                continue
            try:
                content = (self._folder / name).read_bytes()
                known[name] = stamp, msgspec.json.decode(content, type=_Joined).url.rstrip("/")
            except (OSError, msgspec.DecodeError):
                continue  # it is leaving, or someone else's; an engine writes its file whole
        self._known = known
        return {name.removesuffix(".json"): url for name, (_, url) in known.items()}

    def _file_stamps(self) -> list[tuple[str, _Stamp]]:
        """Return the names of the engines' files and what changes when one is written again, in the order of names."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if not entry.name.endswith(".json"):
                    continue
                try:
                    about = entry.stat()
                except FileNotFoundError:
                    continue  # it left meanwhile
                found.append((entry.name, (about.st_ino, about.st_mtime_ns)))
        return sorted(found)
