"""The keeper ends what environments started: processes that left their worker's session, or lost their parents.

Every worker has a mark in its environment variables, which all that it starts inherits; on Linux they can be read. The
keeper is a small process that nobody's death takes along: when the process that owns the workers is gone, however it
ended, it kills whatever has the owner's mark, and ends. Started as `python keeper.py MARK`, so it imports nothing else.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from functools import cache
from pathlib import Path

MARK = "HEADWAY_WORKER"
"""The variable that holds a worker's mark: its owner's, a dot, its own number."""
_PASSES = 50


@cache
def owner_mark() -> str:
    """Return the mark of this process's workers. The first call starts the keeper."""
    mark = uuid.uuid4().hex
    if Path("/proc/self/environ").exists():
        ours = subprocess.PIPE
        command = [sys.executable, "-S", "-E", __file__, mark]
        keeper = subprocess.Popen(command, stdin=ours, stdout=subprocess.DEVNULL, start_new_session=True)
        # It leaves its parent at once, so that it is nobody's child; our end of the pipe closes with this process.
        keeper.wait()
        _pipes.append(keeper)
    return mark


_pipes: list["subprocess.Popen[bytes]"] = []


def end_marked(mark: str, *, whole: bool = True) -> None:
    """Kill the processes with this mark (those with marks that begin with it, if not `whole`), until none is left."""
    needle = f"{MARK}={mark}".encode() + (b"\0" if whole else b"")
    for _ in range(_PASSES):
        found = [pid for pid in _processes() if needle in _environment(pid)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _processes() -> list[int]:
    """List the other processes; none on systems that do not tell, where only a worker's session ends with it."""
    names = [entry.name for entry in Path("/proc").glob("[0-9]*")]
    return [int(name) for name in names if name.isdigit() and int(name) != os.getpid()]


def _environment(pid: int) -> bytes:
    """Read a process's variables; nothing of those that have ended or belong to others."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:
        return b""


def main(mark: str) -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    end_marked(mark, whole=False)


if __name__ == "__main__":
    main(sys.argv[1])
