"""The host's own work: what orchestrator and environment workers compute for a reply, measured in a small run.

On a CPU they share the cores with trainer and engines, and with a small model they need a good part of them.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from headway.base.processes import die_with_parent_environment
from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics

FIRST_STEP, LAST_STEP = 4, 24
"""Steps of the small run between which processor time is counted."""
HOST_COMMANDS = ("orchestrate", "headway.envs.workers.worker")
FLAGS = {
    "model.path": "tiny",
    "seq_len": "128",
    "max_steps": "1000",
    "placement.device": "cpu",
    "orchestrator.batch_size": "64",
    "orchestrator.group_size": "8",
    "orchestrator.sampling.max_tokens": "16",
    "orchestrator.filters.zero_advantage": "false",
    "orchestrator.envs": '[{id = "reverse-text"}]',
    "trainer.checkpoints.interval": "1000",
}


def measure_host(folder: Path, deadline: float) -> float:
    """Return seconds of a core that go to a reply beside engine and trainer; 0 where `deadline` passes before."""
    flags = FLAGS | {"run.output_dir": str(folder), "run.name": "host"}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    with (folder / "host.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headway.cli.main", "rl", *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | die_with_parent_environment(),
        )
    metrics = RunPaths(folder / "host").metrics / "orchestrator.jsonl"
    try:
        first = _snapshot(process, metrics, FIRST_STEP, deadline)
        last = _snapshot(process, metrics, LAST_STEP, deadline)
    finally:
        process.kill()  # its processes end with it
        process.wait()
    if first is None or last is None or last[1] <= first[1]:
        return 0.0
    return max(0.0, last[0] - first[0]) / (last[1] - first[1])


def _snapshot(
    process: "subprocess.Popen[bytes]", metrics: Path, step: int, deadline: float
) -> tuple[float, float] | None:
    """Wait for a step; the processor time of the host's processes and the episodes that have finished."""
    while time.monotonic() < deadline and process.poll() is None:
        lines = [line for line in read_metrics(metrics) if "episodes" in line]
        if lines and lines[-1]["step"] >= step:
            return _host_seconds(process.pid), sum(line["episodes"] for line in lines)
        time.sleep(0.05)
    return None


def _host_seconds(root: int) -> float:
    """Add up the processor time of orchestrator and workers below a process."""
    spent = 0.0
    for process in psutil.Process(root).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if any(word in process.cmdline() for word in HOST_COMMANDS):
                times = process.cpu_times()
                spent += times.user + times.system
    return spent
