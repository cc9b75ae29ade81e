"""The logs of a run: read and searched in bounded pieces, and the times at which processes started."""

import re
import time
from collections import deque
from pathlib import Path
from typing import Any

LOG = re.compile(r"^(?P<process>[A-Za-z0-9_.-]+)_(?P<attempt>\d{3,})\.log$")
STAMP = re.compile(rb"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ")
JSON_STAMP = re.compile(rb'^\{"time": ?(\d+\.?\d*)')
HEAD = 16_384

PIECE = 128 << 10
LONGEST = 4000
"""Characters of a line that the dashboard shows."""


def log_files(folder: Path) -> list[dict[str, Any]]:
    try:
        return [{"name": path.name, "size": path.stat().st_size} for path in _log_paths(folder)]
    except OSError:
        return []


def restart_count(folder: Path, attempts: int = 1) -> int:
    """Count the starts of processes that nobody asked for: each of the run's `attempts` starts every process once."""
    starts: dict[str, int] = {}
    for path in _log_paths(folder):
        process, _, number = path.stem.rpartition("_")
        starts[process] = max(int(number), starts.get(process, 0))
    return sum(max(0, count - attempts) for count in starts.values())


def read_piece(folder: Path, name: str, end: int | None = None, since: int | None = None) -> dict[str, Any]:
    """Read lines up to byte `end` (the end of the file), or from `since` on; `start` and `end` are where they lie.

    Raises KeyError when there is no such log.
    """
    path = _find(folder, name)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        stop = size if end is None else min(max(end, 0), size)
        start = max(0, stop - PIECE)
        if since is not None:
            start = min(max(since, 0), size)
            stop = min(start + PIECE, size)
        file.seek(start)
        data = file.read(stop - start)
    if start and since is None and (cut := data.find(b"\n")) >= 0:
        start, data = start + cut + 1, data[cut + 1 :]
    if since is not None and stop == size and not data.endswith(b"\n"):
        data = data[: data.rfind(b"\n") + 1]
    return {"name": name, "size": size, "start": start, "end": start + len(data), "lines": _text(data)}


def search_log(folder: Path, name: str, text: str, limit: int = 500) -> dict[str, Any]:
    """Find the last `limit` lines that contain `text`, whatever the case. Raises KeyError when there is no such log."""
    needle, total = text.lower().encode(), 0
    found: deque[bytes] = deque(maxlen=limit)
    with _find(folder, name).open("rb") as file:
        while line := file.readline(1 << 20):
            if needle in line.lower():
                found.append(line)
                total += 1
    return {"name": name, "lines": _text(b"".join(found)), "total": total}


def _find(folder: Path, name: str) -> Path:
    """Find a log among those that are there, so that no name from outside becomes part of a path."""
    if name not in {entry["name"] for entry in log_files(folder)}:
        raise KeyError(name)
    return folder / name


def _text(data: bytes) -> list[str]:
    return [line[:LONGEST] for line in data.decode(errors="replace").splitlines()]


def _log_paths(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if LOG.match(path.name) and not path.is_symlink())
    except OSError:
        return []


def attempts(logs: Path) -> list[dict[str, Any]]:
    """List `process`, `attempt` and `time` of every start that left a log, in order of time; `time` may be None.

    The time is that of the first line with a timestamp, else the file's own. In a folder that was copied without times
    the latter is too late; the dashboard leaves out what lies behind the run's end.
    """
    found = []
    for path in _log_paths(logs):
        if (name := LOG.match(path.name)) is not None:
            found.append({"process": name["process"], "attempt": int(name["attempt"]), "time": _started(path)})
    return sorted(found, key=lambda start: (start["time"] or 0.0, start["process"], start["attempt"]))


def _started(path: Path) -> float | None:
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
        modified = path.stat().st_mtime
    except OSError:
        return None
    for line in head.splitlines():
        if (stamp := line_time(line)) is not None:
            return stamp
    return modified if head else None


def line_time(line: bytes) -> float | None:
    """Parse the timestamp that a log line begins with, if it does; plain ones are local time."""
    if (found := JSON_STAMP.match(line)) is not None:
        return float(found[1])
    if (found := STAMP.match(line)) is not None:
        try:
            return time.mktime(time.strptime(found[1].decode(), "%Y-%m-%d %H:%M:%S"))
        except (ValueError, OverflowError):
            return None
    return None
