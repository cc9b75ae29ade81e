"""A group of ranks on this machine: our own command, once per rank, with torchrun's environment.

Ranks can also be started by torchrun itself, which a group over several machines needs. Here it would cost seconds to
start and give ranks half a minute to write their checkpoint when the run is stopped.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headway.core.processes import die_with_parent_environment, free_port

# After one rank failed, the others have this long to end by themselves: with NCCL they may wait for it forever.
GRACE_SECONDS = 10.0
POLL_SECONDS = 0.1


def in_group() -> bool:
    """True if this process was started as one rank of a group."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_in_group() -> int:
    return int(os.environ.get("RANK", "0"))


def run_group(ranks: int, argv: list[str]) -> int:
    """Run `headway *argv` as `ranks` ranks and wait for all; 0 when every rank ended well, else a failed one's code.

    SIGTERM and SIGINT are passed on, and the ranks take the time they need. When one fails, the others end too.
    """
    port = free_port()
    processes = []
    for rank in range(ranks):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # Ranks end with this process, even when it is killed.
            **die_with_parent_environment(),
        }
        command = [sys.executable, "-m", "headway.cli.main", *argv]
        processes.append(subprocess.Popen(command, env={**os.environ, **place}))
    with _passing_on(processes):
        return _wait(processes)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), 0)
        if failed:
            _end(processes)
            return failed if failed > 0 else 128 - failed
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_SECONDS)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _passing_on(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
