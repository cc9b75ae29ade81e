"""Starting a group of ranks on this machine: torchrun around our own command."""

import os
import signal
import subprocess
import sys
from types import FrameType


def in_group() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank_in_group() -> int:
    return int(os.environ.get("RANK", "0"))


def run_group(ranks: int, argv: list[str]) -> int:
    """Run `headway *argv` as `ranks` ranks and wait for all; the exit code, 0 when every rank ended well.

    SIGTERM and SIGINT are passed on, once, and the ranks are given the time they need to end.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        "-m",
        "headway.cli.main",
        *argv,
    ]
    # Its own session: a Ctrl-C at the terminal then reaches the ranks once, through us, and not twice.
    process = subprocess.Popen(command, start_new_session=True)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
