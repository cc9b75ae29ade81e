"""Logs of a run: the end of a file, more of it upwards, and a search, all in bounded pieces."""

from collections import deque
from pathlib import Path
from typing import Any

from headway.monitor.dashboard.attempts import LOG

PIECE = 128 << 10
LONGEST = 4000
"""Characters of a line that a page gets to see."""


def log_files(folder: Path) -> list[dict[str, Any]]:
    try:
        files = sorted(path for path in folder.iterdir() if LOG.match(path.name) and not path.is_symlink())
        return [{"name": path.name, "size": path.stat().st_size} for path in files]
    except OSError:
        return []


def read_piece(folder: Path, name: str, end: int | None = None, since: int | None = None) -> dict[str, Any]:
    """Lines up to byte `end` (the end of the file), or from `since` on; `start` and `end` are where the piece lies.

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
    """The last `limit` lines that contain `text`, whatever the case. Raises KeyError when there is no such log."""
    needle, total = text.lower().encode(), 0
    found: deque[bytes] = deque(maxlen=limit)
    with _find(folder, name).open("rb") as file:
        while line := file.readline(1 << 20):
            if needle in line.lower():
                found.append(line)
                total += 1
    return {"name": name, "lines": _text(b"".join(found)), "total": total}


def _find(folder: Path, name: str) -> Path:
    """By looking the name up among those that are there: no name from outside becomes part of a path."""
    if name not in {entry["name"] for entry in log_files(folder)}:
        raise KeyError(name)
    return folder / name


def _text(data: bytes) -> list[str]:
    return [line[:LONGEST] for line in data.decode(errors="replace").splitlines()]
