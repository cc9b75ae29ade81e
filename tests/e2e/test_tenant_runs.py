"""A host with tenants as users start them: they learn different tasks at once, and survive kills of everything."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import psutil
import pytest
from e2e_runs import EXAMPLES, Run, start

from headway.cli import main
from headway.core.runs import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PARROT = f'[{{id = "{Path(__file__).with_name("parrot.py")}:Parrot"}}]'
"""Wants a word as it is, where the other task wants it backwards."""
FLAGS = (
    *("@", str(EXAMPLES / "reverse_text" / "rl.toml"), "--model.lora.rank", "16", "--trainer.optim.lr", "1e-3"),
    *("--orchestrator.eval.envs", "[]", "--orchestrator.max_lag", "1", "--orchestrator.batch_size", "64"),
    *("--trainer.checkpoints.interval", "3", "--audit", "false"),
)


@contextmanager
def hosting(model: Path, folder: Path) -> Iterator[Run]:
    """A host while it runs."""
    place = ("--run.output_dir", str(folder), "--run.name", "host", "--host.port", "0")
    process = start("host", "--model.path", str(model), "--seq_len", "512", "--placement.device", "cpu", *place)
    run = Run(RunPaths(folder / "host"))
    try:
        wait_for(lambda: (run.paths.control / "host_address").exists())
        yield run
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output[-6000:]
    assert run.processes() == []


def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.05)


def kill(run: Run, words: str) -> None:
    """Kill the process of a run with these words in its command."""
    for process in run.processes():
        try:
            if words in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def test_tenants_learn_two_tasks_while_everything_is_killed(warm_model: Path, tmp_path: Path) -> None:
    runs = {name: Run(RunPaths(tmp_path / name)) for name in ("reverse", "copy", "late")}

    def flags(name: str, steps: int) -> tuple[str, ...]:
        place = ("--model.path", str(warm_model), "--run.output_dir", str(tmp_path), "--run.name", name)
        task = ("--orchestrator.envs", PARROT) if name == "copy" else ()
        return (*FLAGS, *place, *task, "--max_steps", str(steps), "--host", str(tmp_path / "host"))

    with hosting(warm_model, tmp_path) as host:
        tenants = {name: start("rl", *flags(name, 12)) for name in ("reverse", "copy")}
        wait_for(lambda: len(runs["reverse"].metrics("trainer")) >= 3)
        with redirect_stdout(StringIO()) as shown:
            assert main.run(["host", "status", str(tmp_path / "host")]) == 0
        kill(runs["reverse"], " orchestrate ")
        kill(runs["copy"], " train ")
        tenants["late"] = start("rl", *flags("late", 3))
        wait_for(lambda: len(runs["copy"].metrics("trainer")) >= 6)
        kill(host, " host --trainer ")
        for name, process in tenants.items():
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, f"{name}\n{output[-6000:]}"
    assert "\nreverse " in shown.getvalue() and "\ncopy " in shown.getvalue()
    assert (host.paths.logs / "trainer_002.log").exists()
    for name, run in runs.items():
        steps = [line["step"] for line in run.metrics("trainer")]
        assert steps == list(range(1, len(steps) + 1)), name
    for name in ("reverse", "copy"):
        first, last = runs[name].rise()
        assert last > first + 0.06, f"{name}: reward went from {first:.3f} to {last:.3f}"
