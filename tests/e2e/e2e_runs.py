"""Whole runs as a user starts them: real processes, a tiny model, a CPU."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from headway.core.runs import RunPaths

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


def warm_up(folder: Path, rows: list[dict[str, Any]], *flags: str) -> Path:
    """Fine-tune a tiny model on rows; the folder of the checkpoint."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    place = ("--run.output_dir", str(folder), "--run.name", "sft")
    headway("sft", "@", str(EXAMPLES / "warm_up.toml"), "--data.path", str(data), *place, *flags)
    return sorted((folder / "sft" / "exports").iterdir())[-1]


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
