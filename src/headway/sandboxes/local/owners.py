"""Names that say whose a thing is: process id and start time, so that a later process with that id is no owner."""

import itertools
import os
import re
from pathlib import Path

_NAME = re.compile(r"headway-(\d+)-(\d+)-(\w+)")
_numbers = itertools.count()


def start_time(pid: int) -> int | None:
    """Return when process `pid` started, in ticks since boot; None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def owned_name(pid: int | None = None) -> str:
    """Return a new name that belongs to process `pid`, by default this one."""
    pid = pid or os.getpid()
    return f"headway-{pid}-{start_time(pid)}-{next(_numbers)}"


def is_orphan(name: str) -> bool:
    """Tell if `name` was made by `owned_name` in a process that has ended. Other names are never orphans."""
    found = _NAME.fullmatch(name)
    return found is not None and start_time(int(found[1])) != int(found[2])
