"""A run as actors of a real Ray: three nodes on one host; the engine's is killed, and another takes its place."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_runs import Run

from headway.core.runs import RunPaths

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[ray]'"),
]

STEPS = 16


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray of three nodes; only the last has the two cores that the engine asks for."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray's own 15 leaves nothing to a run where the machine is busy
    running = Cluster()
    try:
        add_node(running, cores=1)
        add_node(running, cores=1)
        yield running
    finally:
        running.shutdown()


def add_node(cluster: Any, cores: int) -> Any:
    """Start a node; the first is Ray's head. Ray waits 30 s for one, which is short where the machine is busy."""
    for attempt in range(3):
        try:
            return cluster.add_node(num_cpus=cores, object_store_memory=80_000_000, include_dashboard=False)
        except Exception as error:  # Ray raises nothing more special
            print(f"node did not start, attempt {attempt + 1}: {error}")
    raise AssertionError("Ray starts no node here")


def processes_of(node: Any) -> list[psutil.Process]:
    """All that a node's raylet started."""
    [raylet] = node.all_processes["raylet"]
    return psutil.Process(raylet.process.pid).children(recursive=True)


def wait_until(true: Callable[[], bool], process: "subprocess.Popen[str]", what: str, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, f"the run ended before {what}: {process.communicate()[0][-5000:]}"
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s"
        time.sleep(0.2)


def test_a_run_goes_on_when_the_node_of_its_engine_is_killed_and_replaced(
    rl_flags: list[str], tmp_path: Path, cluster: Any
) -> None:
    engines = add_node(cluster, cores=2)
    folder = tmp_path / "nodes"
    head, trainer = Run(RunPaths(folder / "run")), RunPaths(folder / "run.trainer")
    command = [sys.executable, "-m", "headway.cli.main", "rl", *rl_flags, "--max_steps", str(STEPS)]
    command += ["--deployment.type", "ray", "--deployment.ray.address", cluster.address]
    command += ["--deployment.folder", str(folder), "--deployment.inference.cpus", "2"]
    command += ["--orchestrator.batch_size", "64", "--trainer.checkpoints.interval", "5"]
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env={**os.environ})

    def step() -> int:
        return max((int(line["step"]) for line in head.metrics("trainer")), default=0)

    try:
        wait_until(lambda: step() >= 4, process, "step 4")
        served = [child for child in processes_of(engines) if "serve" in child.cmdline()]
        assert served, "the engine is on the node that has room for it"
        add_node(cluster, cores=2)
        cluster.remove_node(engines, allow_graceful=False)
        psutil.wait_procs(served, timeout=120)
        assert not any(child.is_running() for child in served), "no process outlives its node"
        process.wait(timeout=600)
    finally:
        process.terminate()
        process.wait(timeout=300)
        log.seek(0)
        text = log.read()
        print(text[-6000:])
    assert process.returncode == 0
    assert "engine-0 lost its node; starting again" in text
    assert [line["step"] for line in head.metrics("trainer")] == list(range(1, STEPS + 1)), "each step trained once"
    assert trainer.exports.is_dir() and not head.paths.exports.exists()
    assert (tmp_path / "run" / "control" / "token").read_text() not in text
