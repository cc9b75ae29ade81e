"""A run as a job of a real Slurm: four nodes, a folder each and none in common; queued again, cancelled, resumed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from e2e_runs import Run
from slurm_cluster import Cluster, missing, slurm

from headway.core.runs import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(bool(missing()), reason=str(missing()))]

STEPS = 36


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with slurm(tmp_path / "slurm", nodes=4) as running:
        yield running


def submit(cluster: Cluster, folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "headway.cli.main", "rl", *arguments]
    done = subprocess.run(command, env=cluster.environment, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("job "), done.stdout + done.stderr


def wait_until(true: Callable[[], bool], folder: Path, what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            logs = "".join(file.read_text()[-3000:] for file in folder.glob("headway-*.out"))
            raise AssertionError(f"{what} did not happen in {seconds:.0f} s\n{logs}")
        time.sleep(0.2)


def test_a_run_over_four_nodes_outlives_deaths_requeues_and_cancels(
    rl_flags: list[str], tmp_path: Path, cluster: Cluster
) -> None:
    disks = tmp_path / "disks"
    head, trainer = Run(RunPaths(disks / "node1" / "run")), RunPaths(disks / "node2" / "run.trainer")
    flags = ["--deployment.type", "slurm", "--deployment.inference.nodes", "2", "--max_steps", str(STEPS)]
    flags += ["--deployment.folder", f"{disks}/$SLURMD_NODENAME", "--trainer.checkpoints.interval", "5"]
    flags += ["--orchestrator.batch_size", "64"]

    def step() -> int:
        return max((int(line["step"]) for line in head.metrics("trainer")), default=0)

    submit(cluster, tmp_path, *rl_flags, *flags)
    wait_until(lambda: step() >= 6, tmp_path, "step 6")
    kill_one("train", disks)
    wait_until(lambda: step() >= 9, tmp_path, "a step after the trainer's death")
    job = (tmp_path / "run" / "control" / "slurm_job").read_text()
    asked = step()
    cluster.run("scontrol", "requeue", job)
    wait_until(lambda: max(trainer.complete_checkpoints()) >= asked, tmp_path, "a checkpoint at the requeue")
    before = step()
    wait_until(lambda: step() >= before + 3, tmp_path, "going on after the requeue")
    cluster.run("scancel", job)
    wait_until(lambda: not cluster.jobs(), tmp_path, "the end of the cancelled job")
    assert step() < STEPS
    submit(cluster, tmp_path, "--resume", str(tmp_path / "run"))
    wait_until(lambda: not cluster.jobs(), tmp_path, "the end of the run")

    assert [line["step"] for line in head.metrics("trainer")] == list(range(1, STEPS + 1)), "each step trained once"
    assert trainer.exports.is_dir() and not head.paths.exports.exists()
    assert {entry.name for entry in disks.iterdir()} == {"node1", "node2", "node3", "node4"}
    assert {entry.name for entry in (disks / "node3").iterdir()} == {"run.node3"}, "no node wrote into another's folder"
    first, last = head.rise()
    assert last > first + 0.08, (first, last)  # as on one machine: test_kill.py
    secret = (tmp_path / "run" / "control" / "token").read_text()
    texts = [*tmp_path.glob("headway-*.out"), tmp_path / "run" / "job.sh", *disks.rglob("*.log")]
    assert not any(secret in file.read_text(errors="replace") for file in texts)


def kill_one(command: str, disks: Path) -> None:
    """Kill -9 the process that does the work of a command, which `--restart` then starts again."""
    for process in psutil.process_iter():
        try:
            words, environment = process.cmdline(), process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        mine = environment.get("HEADWAY_LOG", "").startswith(str(disks))
        if mine and command in words and "headway.cli.main" in words:
            os.kill(process.pid, signal.SIGKILL)
            return
    raise AssertionError(f"no process of {command} to kill")
