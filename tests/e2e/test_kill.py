"""Nothing can kill a run: its processes are killed again and again, and it reaches its last step as if nothing was."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e_runs import Run, start

from headway.base.errors import STOPPED
from headway.core.runs import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


def assert_whole(run: Run, steps: int) -> None:
    """One line per step, in order; every batch trained once; nothing left running."""
    for process in ("trainer", "orchestrator"):
        trained = [line["step"] for line in run.metrics(process) if "loss" in line or "batch/episodes" in line]
        assert trained == list(range(1, steps + 1)), process
    versions = [line["version"] for line in run.metrics("orchestrator") if "batch/episodes" in line]
    assert versions == sorted(versions)
    assert run.processes() == []


def test_a_run_survives_kills_stops_and_damaged_files() -> None:
    """Each role is killed and stopped once; a checkpoint, a batch, the weights and the disk are damaged once."""
    command = [sys.executable, str(CHAOS), *("--events", "10", "--steps", "24", "--engines", "1", "--ranks", "1")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.parametrize("moment", [0.3, 4.0, 12.0])
def test_ctrl_c_leaves_no_process_and_a_run_that_resumes(moment: float, rl_flags: list[str], tmp_path: Path) -> None:
    run = Run(RunPaths(tmp_path / "run"))
    process = start("rl", *rl_flags, "--max_steps", "12", "--orchestrator.batch_size", "32")
    while not run.paths.root.exists():
        time.sleep(0.02)
    time.sleep(moment)
    os.kill(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=100)
    assert process.returncode in (STOPPED, 0), said[-6000:]
    if process.returncode == STOPPED and 0 < len(run.metrics("trainer")) < 12:
        assert "stopping: the step is finished first; Ctrl-C again kills at once" in said
        assert f"headway rl --resume {run.paths.root}" in said
    assert run.processes() == []
    resumed = start("rl", "--resume", str(run.paths.root))
    output, _ = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, output[-6000:]
    assert_whole(run, 12)
