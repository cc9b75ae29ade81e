"""Ends vLLM's processes when their server is killed while they start: they do not watch it themselves yet."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SERVER = "HEADWAY_SERVER_PID"
"""Names the process that vLLM's workers belong to; they end with it (`headway.inference.vllm.worker`)."""


@contextmanager
def guarded() -> Iterator[None]:
    """Meanwhile a small process watches this one. What it has to end is known by `SERVER` in the environment."""
    # In a session of its own, it is not told of Ctrl-C.
    guard = subprocess.Popen([sys.executable, "-m", __name__, str(os.getpid())], start_new_session=True)
    try:
        yield
    finally:
        guard.kill()
        guard.wait()


def watch(server: int) -> None:
    """Wait for the end of `server`, then end what it has left behind."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(server)], [], [])
    mark = f"{SERVER}={server}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        # Processes come and go, and others' are none of our business.
        with suppress(OSError):
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]))
