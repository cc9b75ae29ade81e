"""Whole runs as a user starts them: real processes, a tiny model, a CPU."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from headway.base.errors import STOPPED
from headway.core.runs import RunPaths
from headway.envs.bundled import reverse_text

EXAMPLES = Path(__file__).parents[2] / "examples"
LOTTERY = (
    *("--model.path", "tiny", "--seq_len", "128", "--trainer.optim.lr", "1e-5"),
    *("--orchestrator.batch_size", "16", "--orchestrator.group_size", "4", "--orchestrator.sampling.max_tokens", "8"),
    *("--orchestrator.envs", f'[{{id = "{Path(__file__).with_name("lottery.py")}:Lottery", name = "lottery"}}]'),
)
"""Flags of a run whose untrained model has a training signal: replies win by chance."""


@dataclass(frozen=True)
class Run:
    """A run folder, and what was recorded in it."""

    paths: RunPaths

    def metrics(self, process: str) -> list[dict[str, Any]]:
        file = self.paths.metrics / f"{process}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def column(self, process: str, name: str) -> list[float]:
        return [line[name] for line in self.metrics(process) if line.get(name) is not None]

    def rise(self, name: str = "reward/mean", share: float = 0.2) -> tuple[float, float]:
        """Means over the first and over the last `share` of the steps."""
        values = self.column("orchestrator", name)
        n = max(1, int(len(values) * share))
        return sum(values[:n]) / n, sum(values[-n:]) / n

    def rise_over(self, steps: int, name: str = "reward/mean") -> tuple[float, float] | None:
        """Means over the first and over the last `steps`; None before there are as many of both."""
        values = self.column("orchestrator", name)
        enough = len(values) >= 2 * steps
        return (sum(values[:steps]) / steps, sum(values[-steps:]) / steps) if enough else None

    def processes(self) -> list[psutil.Process]:
        """Everything alive that was started for this run, by the run's folder in its command or environment."""
        mark = str(self.paths.root)
        return [process for process in psutil.process_iter() if _mentions(process, mark) and process.pid != os.getpid()]


RunRl = Callable[..., Run]
"""Runs `headway rl` with more flags to its end."""


def _mentions(process: psutil.Process, mark: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return mark in " ".join(process.cmdline()) or mark in process.environ().get("HEADWAY_LOG", "")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def start(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "headway.cli.main", *arguments]
    # One thread: several wait for each other, which takes forever where something else runs beside the tests.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def headway(*arguments: str) -> str:
    """Run a command to its end; its output. Fails the test when the command fails."""
    process = start(*arguments)
    output, _ = process.communicate()
    assert process.returncode == 0, f"headway {' '.join(arguments)}\n{output[-6000:]}"
    return output


MORE = 0.05
"""By how much a bar must be passed before a run is stopped: it finishes a step first, and has to hold the bar in it."""


def rl_until(learned: Callable[[float], bool], *arguments: str) -> None:
    """Start `headway rl`, and stop it as a user does once it has learned; otherwise it ends with its last step."""
    process = start("rl", *arguments)
    stopped = False
    while True:
        try:
            output, _ = process.communicate(timeout=1)
            break
        except subprocess.TimeoutExpired:
            if not stopped and learned(MORE):
                process.send_signal(signal.SIGINT)
                stopped = True
    assert process.returncode in (0, STOPPED if stopped else 0), output[-6000:]


def warm_up(folder: Path, rows: list[dict[str, Any]], *flags: str) -> Path:
    """Fine-tune a tiny model on rows; the folder of the checkpoint."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    place = ("--run.output_dir", str(folder), "--run.name", "sft")
    headway("sft", "@", str(EXAMPLES / "warm_up.toml"), "--data.path", str(data), *place, *flags)
    return sorted((folder / "sft" / "exports").iterdir())[-1]


def short_words(longest: int) -> tuple[str, ...]:
    """Flags of a run that reverses words of three to `longest` letters."""
    env = f'[{{id = "reverse-text", args = {{min_len = 3, max_len = {longest}}}}}]'
    return ("--orchestrator.envs", env, "--orchestrator.eval.envs", "[]")


def warm_up_on_short_words(folder: Path, shape: str, longest: int, *flags: str) -> Path:
    """The same for a built-in model that reverses about every other of such words, which takes few steps."""
    rows = reverse_text.demonstrations(10_000, seed=0, copy_share=0.5, min_len=3, max_len=longest)
    short = ("--max_steps", "300", "--trainer.schedule.decay_steps", "150")
    return warm_up(folder, rows, "--model.path", shape, *short, *flags)


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """A server while it serves; its address."""
    server = start("serve", *arguments, "--port", "0")
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if found := re.search(r"http://\S+", line):
                yield found[0]
                break
        else:
            raise AssertionError("the server ended before it served")
    finally:
        server.terminate()
        server.communicate(timeout=60)
