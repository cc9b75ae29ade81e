"""Nothing can kill a run: its processes are killed again and again, and it reaches its last step as if nothing was."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from e2e_runs import Run, RunRl, headway, start

from headway.core.runs import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VICTIMS = ("train", "orchestrate", "serve", "headway.envs.workers.worker")
STEPS = 60


def victims(run: Run, kind: str) -> list[psutil.Process]:
    """Processes of one kind, by a word of their command line."""
    family = [p for top in run.processes() for p in [top, *_children(top)]]
    return [process for process in set(family) if kind in _command(process)]


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def newest_step(run: Run) -> int:
    return max((int(line["step"]) for line in run.metrics("trainer")), default=0)


def wait_for_step(run: Run, step: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 240
    while newest_step(run) < step:
        assert process.poll() is None, process.communicate()[0][-6000:]
        assert time.monotonic() < deadline, f"no progress beyond step {newest_step(run)}"
        time.sleep(0.1)


def assert_whole(run: Run, steps: int) -> None:
    """One line per step, in order; every batch trained once; nothing left running."""
    for process in ("trainer", "orchestrator"):
        trained = [line["step"] for line in run.metrics(process) if "loss" in line or "batch/episodes" in line]
        assert trained == list(range(1, steps + 1)), process
    versions = [line["version"] for line in run.metrics("orchestrator") if "batch/episodes" in line]
    assert versions == sorted(versions)
    assert run.processes() == []


def test_a_run_survives_the_death_of_each_of_its_processes(rl_flags: list[str], tmp_path: Path) -> None:
    rng = random.Random(7)
    run = Run(RunPaths(tmp_path / "run"))
    process = start("rl", *rl_flags, "--max_steps", str(STEPS), "--trainer.checkpoints.interval", "7")
    killed = dict.fromkeys(VICTIMS, 0)
    schedule = [kind for kind in VICTIMS for _ in range(2)]
    rng.shuffle(schedule)
    for number, kind in enumerate(schedule):
        wait_for_step(run, 3 + number * (STEPS - 10) // len(schedule), process)
        time.sleep(rng.random())
        for victim in victims(run, kind)[:1]:
            victim.kill()
            killed[kind] += 1
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-6000:]
    assert all(killed.values()), killed
    assert_whole(run, STEPS)
    first, last = run.rise()
    assert last > first + 0.08, (first, last)


def test_a_killed_supervisor_takes_its_processes_along_and_the_run_resumes(rl_flags: list[str], tmp_path: Path) -> None:
    run = Run(RunPaths(tmp_path / "run"))
    flags = ["--max_steps", "20", "--trainer.checkpoints.interval", "6"]
    process = start("rl", *rl_flags, *flags)
    wait_for_step(run, 9, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 20
    while run.processes():
        assert time.monotonic() < deadline, run.processes()
        time.sleep(0.1)
    resumed = start("rl", "--resume", str(run.paths.root))
    output, _ = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, output[-6000:]
    assert_whole(run, 20)


@pytest.mark.parametrize("moment", [0.3, 4.0, 12.0])
def test_ctrl_c_leaves_no_process_and_a_run_that_resumes(moment: float, rl_flags: list[str], tmp_path: Path) -> None:
    run = Run(RunPaths(tmp_path / "run"))
    process = start("rl", *rl_flags, "--max_steps", "12")
    while not run.paths.root.exists():
        time.sleep(0.02)
    time.sleep(moment)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode in (130, 0)
    assert run.processes() == []
    resumed = start("rl", "--resume", str(run.paths.root))
    output, _ = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, output[-6000:]
    assert_whole(run, 12)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(run_rl: RunRl) -> None:
    run = run_rl("--max_steps", "8", "--trainer.checkpoints.interval", "3")
    assert run.paths.complete_checkpoints() == [6, 8]
    (run.paths.checkpoint(8) / "trainer" / "__0_0.distcp").unlink()
    headway("rl", "--resume", str(run.paths.root), "--max_steps", "11")
    aside = run.paths.checkpoint(8).with_name(f"damaged_{run.paths.checkpoint(8).name}")
    assert aside.is_dir() and run.paths.complete_checkpoints() == [9, 11]
    assert_whole(run, 11)
