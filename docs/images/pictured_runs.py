"""Makes the runs that the pictures of the dashboard show: real ones, on this machine.

A run that is in the folder already is not made again.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LEARNED = "reverse-text"
"""The quickstart's task, learned without trouble."""
RESTARTED = "restarted"
"""The same with half the learning rate; its processes are killed one after the other."""
HACKED = "forgetful"
"""A reward with a mistake, which the policy finds."""
PRICES = ("--cost.core_hour", "0.04", "--cost.kwh", "0.3")
KILLS = {8: "train", 13: "serve", 18: "headway.envs.workers.worker"}
"""A word of the command line of the process to kill, by the step after which it is killed: steps between checkpoints,
so that the trainer has a whole one to continue from."""


def make_runs(folder: Path) -> bool:
    """Make every run that `folder` does not have yet. Returns whether this machine could be measured for a plan."""
    folder.mkdir(parents=True, exist_ok=True)
    model = _warmed_up(folder)
    rl = ["rl", "@", "examples/reverse_text/rl.toml", "--model.path", str(model), *_place(folder), *PRICES]
    short = ["--max_steps", "25", "--orchestrator.batch_size", "64", "--trainer.checkpoints.interval", "5"]
    if not (folder / LEARNED).exists():
        _wait(_start(*rl, "--run.name", LEARNED))
    if not (folder / RESTARTED).exists():
        process = _start(*rl, *short, "--trainer.optim.lr", "5e-5", "--run.name", RESTARTED)
        _kill_in_turn(process, RunPaths(folder / RESTARTED))
        _wait(process)
    if not (folder / HACKED).exists():
        named = f'id = "{HERE / "forgetful.py"}:Forgetful", name = "{HACKED}"'
        env = f"[{{{named}, args = {{exact = 1.0, similarity = 0.0}}}}]"
        _wait(_start(*rl, *short, "--trainer.optim.lr", "3e-4", "--orchestrator.envs", env, "--run.name", HACKED))
    return _start("plan", str(folder / LEARNED)).wait() == 0


def _warmed_up(folder: Path) -> Path:
    """Fine-tune the tiny model as the quickstart does, and return its export."""
    exports, data = folder / "warm-up" / "exports", folder / "demonstrations.jsonl"
    if not exports.exists():
        _wait(_start("env", "demos", LEARNED, "-n", "20000", "--args.copy_share", "0.5", "-o", str(data)))
        sft = ["sft", "@", "examples/warm_up.toml", "--data.path", str(data), "--run.name", "warm-up"]
        _wait(_start(*sft, *_place(folder)))
    return max(exports.iterdir())


def _place(folder: Path) -> list[str]:
    return ["--run.output_dir", str(folder)]


def _kill_in_turn(process: "subprocess.Popen[bytes]", paths: RunPaths) -> None:
    for step, word in KILLS.items():
        while process.poll() is None and _step(paths) < step:
            time.sleep(0.2)
        victims = list(_with_word(process.pid, word))
        if not victims:
            process.terminate()
            raise SystemExit(f"no process of the run has the word {word} in its command line, so none could be killed")
        for victim in victims:
            victim.kill()


def _step(paths: RunPaths) -> int:
    return max((int(line["step"]) for line in read_metrics(paths.metrics / "trainer.jsonl")), default=0)


def _with_word(launcher: int, word: str) -> Iterator[psutil.Process]:
    """Find the processes below a launcher that have a word in their command line."""
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            if word in process.cmdline():
                yield process
        except psutil.Error:
            continue


def _start(*arguments: str) -> "subprocess.Popen[bytes]":
    print("$ headway", *arguments, flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.Popen([sys.executable, "-m", "headway.cli.main", *arguments], cwd=ROOT, env=environment)


def _wait(process: "subprocess.Popen[bytes]") -> None:
    if code := process.wait():
        raise SystemExit(f"a run for the pictures ended with {code}; its output is above")
