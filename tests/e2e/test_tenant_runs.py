"""A host with tenants as users start them: they learn different tasks at once, and survive kills of everything."""

import json
import os
import signal
import subprocess
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


def mentions(folder: Path, words: str) -> list[Path]:
    """Find the files of a folder with these words in them."""
    return [file for file in folder.rglob("*") if file.is_file() and words.encode() in file.read_bytes()]


def start_taught(model: Path, here: Path, url: str) -> "subprocess.Popen[str]":
    """Start a supervised tenant, and kill all of it after a few steps."""
    rows = [{"prompt": word, "completion": word[::-1]} for word in ("red", "green", "blue", "black", "white")]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 8))
    data = [part for key in ("path", "validation_path") for part in (f"--data.{key}", str(here / "rows.jsonl"))]
    process = start(
        *("sft", *data, "--model.path", str(model), "--model.lora.rank", "8", "--trainer.optim.lr", "5e-3"),
        *("--seq_len", "128", "--batch_tokens", "512", "--max_steps", "12", "--validation_interval", "4"),
        *("--trainer.checkpoints.interval", "4", "--placement.device", "cpu"),
        *("--run.output_dir", str(here), "--run.name", "taught", "--host", url),
    )
    run = Run(RunPaths(here / "taught"))
    wait_for(lambda: len(run.metrics("trainer")) >= 6 or process.poll() is not None)
    process.kill()
    process.communicate()
    return start("sft", "--resume", str(run.paths.root))


def test_tenants_learn_two_tasks_while_everything_is_killed(
    warm_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"  # of tenants, and of the host: as on two machines
    here.mkdir()
    runs = {name: Run(RunPaths(here / name)) for name in ("reverse", "copy", "late", "taught")}

    def flags(name: str, steps: int) -> tuple[str, ...]:
        place = ("--model.path", str(warm_model), "--run.output_dir", str(here), "--run.name", name)
        task = ("--orchestrator.envs", PARROT) if name == "copy" else ()
        return (*FLAGS, *place, *task, "--max_steps", str(steps), "--host", url)

    with hosting(warm_model, there) as host:
        url = (host.paths.control / "host_address").read_text().strip()
        monkeypatch.setenv("HEADWAY_TOKEN", (host.paths.control / "join_token").read_text())
        tenants = {name: start("rl", *flags(name, 12)) for name in ("reverse", "copy")}
        wait_for(lambda: len(runs["reverse"].metrics("trainer")) >= 3)
        with redirect_stdout(StringIO()) as shown:
            assert main.run(["host", "status", str(there / "host")]) == 0
        kill(runs["reverse"], " orchestrate ")
        kill(runs["copy"], " train ")
        tenants["late"] = start("rl", *flags("late", 3))
        tenants["taught"] = start_taught(warm_model, here, url)
        wait_for(lambda: len(runs["copy"].metrics("trainer")) >= 6)
        kill(host, " host --trainer ")
        for name, process in tenants.items():
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, f"{name}\n{output[-6000:]}"
    assert mentions(there, str(here)) == mentions(here, str(there)) == []
    assert "\nreverse " in shown.getvalue() and "\ncopy " in shown.getvalue()
    assert (host.paths.logs / "trainer_002.log").exists()
    for name, run in runs.items():
        steps = [line["step"] for line in run.metrics("trainer")]
        assert steps == list(range(1, len(steps) + 1)), name
    for name in ("reverse", "copy"):
        first, last = runs[name].rise()
        assert last > first + 0.06, f"{name}: reward went from {first:.3f} to {last:.3f}"
    losses = runs["taught"].column("trainer", "validation/loss")
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.1, losses
