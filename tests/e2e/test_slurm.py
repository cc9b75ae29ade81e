"""A run as a job of a real Slurm: a node and a folder for each role and none in common; links, processes and a node
die, the job is queued again, cancelled, resumed, and every step is trained once."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from e2e_runs import Run
from slurm_cluster import Cluster, missing, slurm

from headway.core.runs import RunPaths
from headway.transport.control.folder import FolderControl
from namespaces import Host

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(bool(missing()), reason=str(missing()))]

CUT_SECONDS = 30


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Four nodes for the run, and two to spare, in a folder with a short name: Slurm makes sockets in it."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        slurm(Path(folder), nodes=6) as running,
    ):
        yield running


def headway(cluster: Cluster, folder: Path, *arguments: str) -> str:
    """Run a command on this machine, the login node; its output."""
    command = [sys.executable, "-m", "headway.cli.main", *arguments]
    done = subprocess.run(command, env=cluster.environment, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(cluster: Cluster, folder: Path, *arguments: str) -> str:
    """Submit a run and return the number of its job."""
    assert headway(cluster, folder, "rl", *arguments).startswith("job ")
    return (folder / "run" / "control" / "slurm_job").read_text()


def kill(host: Host, command: str, *, supervised: bool) -> None:
    """Kill -9 the process of a command on a host: the one that does the work, or the one that looks after it."""
    for pid in host.processes():
        try:
            process = psutil.Process(pid)
            words, mine = process.cmdline(), "HEADWAY_LOG" in process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if "headway.cli.main" in words and command in words and mine == supervised:
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError(f"no process of {command} to kill")


def test_a_run_over_four_nodes_outlives_deaths_a_cut_link_requeues_and_cancels(
    rl_flags: list[str], tmp_path: Path, cluster: Cluster
) -> None:
    disks = tmp_path / "disks"
    head, trainer = Run(RunPaths(disks / "node1" / "run")), RunPaths(disks / "node2" / "run.trainer")
    flags = ["--deployment.type", "slurm", "--deployment.inference.nodes", "2", "--max_steps", "1000"]
    flags += ["--deployment.folder", f"{disks}/$SLURMD_NODENAME", "--trainer.checkpoints.interval", "5"]
    flags += ["--orchestrator.batch_size", "32"]

    def step() -> int:
        return max((int(line["step"]) for line in head.metrics("trainer")), default=0)

    def wait_until(true: Callable[[], bool], what: str, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                logs = "".join(file.read_text()[-3000:] for file in tmp_path.glob("headway-*.out"))
                raise AssertionError(f"{what} did not happen in {seconds:.0f} s\n{logs}")
            time.sleep(0.2)

    def go_on(steps: int, after: str) -> None:
        before = step()
        wait_until(lambda: step() >= before + steps, f"steps after {after}")

    node1, node2, node3, *_ = cluster.nodes.values()
    job = submit(cluster, tmp_path, *rl_flags, *flags)
    go_on(3, "the start")
    kill(node2, "train", supervised=True)
    go_on(3, "the death of the trainer")
    kill(node1, "rl", supervised=False)
    go_on(3, "the death of the head")
    node2.cut()
    healed_at = time.monotonic() + CUT_SECONDS
    kill(node3, "serve", supervised=True)
    kill(node1, "orchestrate", supervised=True)
    time.sleep(max(0.0, healed_at - time.monotonic()))
    node2.heal()
    go_on(3, "the cut of the trainer's link and the deaths of an engine and the orchestrator")
    wait_until(lambda: len(FolderControl(head.paths).engines()) == 2, "the return of the engine")
    assert cluster.restarts(job) == 0, "the run itself outlived all that"
    assert "trainer trainer on node2" in headway(cluster, tmp_path, "status", "run"), "found by its job"

    cluster.notice_deaths_after(5)
    for name in ("node3", "node4"):  # without engines no step is trained, however long Slurm takes to notice
        cluster.kill_node(name)
    wait_until(lambda: cluster.restarts(job) == 1, "queueing the job again")
    cluster.notice_deaths_after(300)
    wait_until(lambda: cluster.jobs() == "RUNNING", "a new start of the job")
    go_on(3, "the deaths of two nodes")

    asked = step()
    cluster.run("scontrol", "requeue", job)
    wait_until(lambda: max(trainer.complete_checkpoints()) >= asked, "a checkpoint at the requeue")
    go_on(3, "the requeue")
    cluster.run("scancel", job)
    wait_until(lambda: not cluster.jobs(), "the end of the cancelled job")
    last_step = step() + 10
    submit(cluster, tmp_path, "--resume", str(tmp_path / "run"), "--max_steps", str(last_step))
    wait_until(lambda: not cluster.jobs(), "the end of the run")

    assert [line["step"] for line in head.metrics("trainer")] == list(range(1, last_step + 1)), "each trained once"
    assert trainer.exports.is_dir() and not head.paths.exports.exists()
    assert {entry.name for entry in disks.iterdir()} == set(cluster.nodes), "spare nodes took the place of dead ones"
    assert {entry.name for entry in (disks / "node3").iterdir()} == {"run.node3"}, "no node wrote into another's folder"
    first, last = head.rise()
    assert last > first + 0.08, (first, last)  # as on one machine: test_kill.py
    secret = (tmp_path / "run" / "control" / "token").read_text()
    texts = [*tmp_path.glob("headway-*.out"), tmp_path / "run" / "job.sh", *disks.rglob("*.log")]
    assert not any(secret in file.read_text(errors="replace") for file in texts)
