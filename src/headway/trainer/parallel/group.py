"""A group of ranks on this machine: our own command, once per rank, with torchrun's environment.

Ranks can also be started by torchrun itself. Here it would cost seconds to start and give ranks half a minute to write
their checkpoint when the run is stopped.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headway.base.processes import die_with_parent_environment, free_port
from headway.core.control import GroupPlace

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
    processes = start_ranks(ranks, argv, GroupPlace(1, 0, ranks, "127.0.0.1", free_port()))
    with passing_on(processes):
        while (code := exit_code(processes)) is None:
            time.sleep(POLL_SECONDS)
    return code


def start_ranks(ranks: int, argv: list[str], place: GroupPlace) -> list[subprocess.Popen[bytes]]:
    """Start `headway *argv` as this host's ranks of a group."""
    processes = []
    for rank in range(ranks):
        environment = {
            "RANK": str(place.first_rank + rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": place.address,
            "MASTER_PORT": str(place.port),
            # Ranks end with this process, even when it is killed.
            **die_with_parent_environment(),
        }
        command = [sys.executable, "-m", "headway.cli.main", *argv]
        processes.append(subprocess.Popen(command, env={**os.environ, **environment}))
    return processes


def exit_code(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Return the code with which this host's ranks have ended, None while they run. When one failed, all are ended."""
    codes = [process.poll() for process in processes]
    failed = next((code for code in codes if code), 0)
    if failed:
        end_ranks(processes)
        return failed if failed > 0 else 128 - failed
    return 0 if all(code == 0 for code in codes) else None


def end_ranks(processes: list[subprocess.Popen[bytes]], grace_seconds: float = GRACE_SECONDS) -> None:
    """Give ranks some time to end by themselves, and kill those that do not."""
    deadline = time.monotonic() + grace_seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def passing_on(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Send SIGTERM and SIGINT on to ranks, while the context lasts."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
