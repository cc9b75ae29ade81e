"""When the processes of a run were started: from the names and first lines of their logs."""

import re
import time
from pathlib import Path
from typing import Any

LOG = re.compile(r"^(?P<process>[A-Za-z0-9_.-]+)_(?P<attempt>\d{3,})\.log$")
STAMP = re.compile(rb"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ")
JSON_STAMP = re.compile(rb'^\{"time": ?(\d+\.?\d*)')
HEAD = 16_384


def attempts(logs: Path) -> list[dict[str, Any]]:
    """`process`, `attempt` and `time` of every start that left a log, in order of time; `time` may be None.

    The time is that of the first line that carries one. A log whose lines carry none was last written when its
    process said that it was up, so the file's own time is taken; where the folder was copied without times that is
    too late, and a page leaves out what lies behind the run's end.
    """
    found = []
    for path in _log_files(logs):
        name = LOG.match(path.name)
        if name is not None:
            start = {"process": name["process"], "attempt": int(name["attempt"]), "time": _started(path)}
            found.append(start)
    return sorted(found, key=lambda start: (start["time"] or 0.0, start["process"], start["attempt"]))


def _log_files(logs: Path) -> list[Path]:
    try:
        return sorted(path for path in logs.iterdir() if path.is_file() and not path.is_symlink())
    except OSError:
        return []


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
    """Seconds since the epoch that a log line begins with, if it does; plain stamps are local time."""
    if (found := JSON_STAMP.match(line)) is not None:
        return float(found[1])
    if (found := STAMP.match(line)) is not None:
        try:
            return time.mktime(time.strptime(found[1].decode(), "%Y-%m-%d %H:%M:%S"))
        except (ValueError, OverflowError):
            return None
    return None
