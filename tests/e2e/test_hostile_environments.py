"""Environments that misbehave in every way at once: the run goes on, counts what happened, and names who did it."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from e2e_runs import LOTTERY, Run, start

from headway.base.errors import STOPPED
from headway.core.records import read_rollouts, recorded_steps
from headway.core.runs import RunPaths

HERE = Path(__file__).parent
FAILURES = {
    "hang": {"timeout"},
    "raise": {"environment"},
    "exit": {"environment"},
    "crash": {"worker"},
    "leak": {"environment", "worker", "timeout"},
    "nan": {"reward"},
}
"""The errors of the episodes of each. Without memory it depends who asks for more; a busy machine may not get there."""


def environments() -> str:
    bad = [
        f'{{id = "{HERE}/hostile.py:Hostile", name = "{how}", args = {{how = "{how}"}}, '
        f"timeout = {1 if how == 'hang' else 6}, ratio = 0.25, workers = {{max = 1, episodes = 1, memory_gb = 1}}}}"
        for how in (*FAILURES, "fork", "print")
    ]
    good = f'{{id = "{HERE}/lottery.py:Lottery", name = "lottery"}}'
    return f"[{', '.join([good, *bad])}]"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_whatever_its_environments_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=":")
    flags = ("--run.output_dir", str(tmp_path), "--run.name", "run", "--orchestrator.max_error_share", "1")
    # So fast a run gives up what hangs as too old, before the time of its episodes is over.
    flags += ("--orchestrator.max_lag", "400")
    process = start("rl", *LOTTERY, *flags, "--max_steps", "500", "--orchestrator.envs", environments())
    run = Run(RunPaths(tmp_path / "run"))
    deadline = time.monotonic() + 240
    while (unseen := unseen_failures(run)) or len(run.metrics("trainer")) < 3:
        assert process.poll() is None and time.monotonic() < deadline, (unseen, run.metrics("trainer"))
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == STOPPED, output[-6000:]
    steps = [line["step"] for line in run.metrics("trainer")]
    assert steps == list(range(1, len(steps) + 1))
    assert sum(run.column("orchestrator", "workers/lost")) > 0
    assert sum(run.column("orchestrator", "errors/environment")) > 0
    _assert_nothing_sleeps_on()


def unseen_failures(run: Run) -> set[str]:
    """What misbehaves, and is not yet among the recorded episodes with the error that it should have."""
    kinds: dict[str, set[str]] = {how: set() for how in FAILURES}
    for step in recorded_steps(run.paths, untrained=True):
        for record in read_rollouts(run.paths, step, untrained=True):
            if record.episode.error is not None and record.env in kinds:
                assert record.cause == "failed"
                kinds[record.env].add(record.episode.error.kind)
    return {how for how, expected in FAILURES.items() if not kinds[how] & expected}


def _assert_nothing_sleeps_on() -> None:
    """What environments started ends with the run."""
    deadline = time.monotonic() + 120
    while left := [process for process in psutil.process_iter() if _started_by_the_run(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _started_by_the_run(process: psutil.Process) -> bool:
    """True for all that has the variables of the run, whatever it is and whoever its parent is now."""
    try:
        return process.pid != os.getpid() and str(HERE) in process.environ().get("PYTHONPATH", "").split(":")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
