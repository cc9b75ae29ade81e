"""A run as a job of a real Slurm: a folder on each node and none in common, a trainer of two nodes. Links, processes
and nodes die; the job is queued again, cancelled, resumed; the trainer goes on with another node, then with one less;
and every step is trained once."""

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
from namespaces import Host

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(bool(missing()), reason=str(missing()))]

CUT_SECONDS = 30


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Four nodes for the run, and one to spare, in a folder with a short name: Slurm makes sockets in it."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        slurm(Path(folder), nodes=5) as running,
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
            words, mine = process.cmdline(), not {"HEADWAY_LOG", "RANK"}.isdisjoint(process.environ())
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
    flags = ["--deployment.type", "slurm", "--max_steps", "1000", "--trainer.checkpoints.interval", "5"]
    flags += ["--deployment.trainer.nodes", "2", "--deployment.trainer.fewest", "1", "--placement.trainer_ranks", "2"]
    flags += ["--deployment.folder", f"{disks}/$SLURMD_NODENAME", "--orchestrator.batch_size", "32"]

    def output() -> str:
        return "".join(file.read_text() for file in tmp_path.glob("headway-*.out"))

    def step() -> int:
        return max((int(line["step"]) for line in head.metrics("trainer")), default=0)

    def wait_until(true: Callable[[], bool], what: str, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s\n{output()[-9000:]}"
            time.sleep(0.2)

    def go_on(steps: int, after: str) -> None:
        before = step()
        wait_until(lambda: step() >= before + steps, f"steps after {after}")

    node1, node2, node3, node4, _ = cluster.nodes.values()
    job = submit(cluster, tmp_path, *rl_flags, *flags)
    go_on(6, "the start")
    kill(node2, "train", supervised=True)
    kill(node1, "rl", supervised=False)
    go_on(2, "the deaths of a rank and of the head")
    node3.cut()
    healed_at = time.monotonic() + CUT_SECONDS
    kill(node4, "serve", supervised=True)
    kill(node1, "orchestrate", supervised=True)
    time.sleep(max(0.0, healed_at - time.monotonic()))
    node3.heal()
    go_on(2, "the cut of a rank's link and the deaths of the engine and the orchestrator")
    assert cluster.restarts(job) == 0, "the run itself outlived all that"
    assert "trainer trainer on node2" in headway(cluster, tmp_path, "status", "run"), "found by its job"

    cluster.notice_deaths_after(5)
    cluster.kill_node("node3")
    wait_until(lambda: cluster.restarts(job) == 1, "queueing the job again")
    cluster.notice_deaths_after(300)
    go_on(2, "the death of a trainer's node, whose place one with an empty disk took")
    cluster.kill_node("node4")
    cluster.run("scontrol", "update", "nodename=node4", "state=down", "reason=dead")  # as a health check says it
    wait_until(lambda: cluster.restarts(job) == 2, "queueing the job once more")
    go_on(2, "the death of another one, without a spare")
    assert "ranks 1 to 1 of 2" in output() and "ranks 0 to 0 of 1" in output()

    asked = step()
    cluster.run("scontrol", "requeue", job)
    wait_until(lambda: max(trainer.complete_checkpoints()) >= asked, "a checkpoint at the requeue")
    go_on(2, "the requeue")
    cluster.run("scancel", job)
    wait_until(lambda: not cluster.jobs(), "the end of the cancelled job")
    last_step = step() + 6
    submit(cluster, tmp_path, "--resume", str(tmp_path / "run"), "--max_steps", str(last_step))
    wait_until(lambda: not cluster.jobs(), "the end of the run")

    assert [line["step"] for line in head.metrics("trainer")] == list(range(1, last_step + 1)), "each trained once"
    assert trainer.exports.is_dir() and not head.paths.exports.exists()
    roles = {entry.name: {folder.name for folder in entry.iterdir()} for entry in disks.iterdir()}
    ranks, engines = {"run.trainer"}, {"run.node4"}
    assert roles == {"node1": {"run"}, "node2": ranks, "node3": ranks, "node4": ranks | engines, "node5": {"run.node5"}}
    first, last = head.rise()
    assert last > first + 0.08, (first, last)  # as on one machine: test_kill.py
    secret = (tmp_path / "run" / "control" / "token").read_text()
    texts = [*tmp_path.glob("headway-*.out"), tmp_path / "run" / "job.sh", *disks.rglob("*.log")]
    assert not any(secret in file.read_text(errors="replace") for file in texts)
