"""Runs whose engine is vLLM: they learn, the trainer agrees, and killing the engine costs a restart."""

import signal
import time
from pathlib import Path

import psutil
import pytest
from e2e_runs import Run, RunRl, start

from headway.core.runs import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.vllm]

VLLM = ("--inference.engine", "vllm", "--inference.max_running", "128", "--orchestrator.max_lag", "0")
VLLM += ("--model.dtype", "float32")
STEPS = 36


def test_it_learns_with_an_engine_that_is_killed_on_the_way(rl_flags: list[str], tmp_path: Path) -> None:
    run = Run(RunPaths(tmp_path / "run"))
    process = start("rl", *rl_flags, *VLLM, "--max_steps", str(STEPS), "--weights.type", "shared_memory")
    while len(run.metrics("trainer")) < STEPS // 2:
        assert process.poll() is None, process.communicate()[0][-6000:]
        time.sleep(0.1)
    family = engine_family(run)
    assert len(family) > 1, "vLLM's engine has a process of its own"
    family[0].send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 0, output[-6000:]

    assert "inference-0 died (signal SIGKILL)" in output and "inference-0 restarted" in output
    assert not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in family)
    assert run.processes() == []
    trained = [line["step"] for line in run.metrics("trainer")]
    assert trained == list(range(1, STEPS + 1))
    assert_on_policy(run)
    first, last = run.rise(share=0.25)
    assert last > first + 0.1, f"reward went from {first:.3f} to {last:.3f}"


def test_weights_reach_it_through_files_too(run_rl: RunRl) -> None:
    run = run_rl(*VLLM, "--max_steps", "4", "--weights.type", "filesystem")
    assert_on_policy(run)
    assert run.column("orchestrator", "version")[-1] == 3


def assert_on_policy(run: Run) -> None:
    assert max(run.column("orchestrator", "lag/max")) == 0
    assert max(run.column("trainer", "mismatch_kl")) < 1e-4


def engine_family(run: Run) -> list[psutil.Process]:
    """The server of the run's engine, then everything that it started."""
    server = next(process for process in run.processes() if "serve" in process.cmdline())
    return [server, *server.children(recursive=True)]
