"""Whether asynchronous runs replay to the same bits: random CPU runs whose processes are killed, each replayed twice.

    python benchmarks/replay.py --runs 10 --parallel 5 --save benchmarks/results/replay.json

Every run has two environments, a lag of up to 4, random sizes, and is killed in three places: a random process each
time. Then `headway replay` repeats it from the start, and from the checkpoint of a step in its middle. With
--parallel, so many runs go on beside each other, on cores of their own.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics
from lanes import Case, Outcome, run_cases

VICTIMS = ("train", "orchestrate", "serve", "headway.envs.workers.worker")
ENVIRONMENT = '''\
"""Replies win by chance, so that an untrained model has a training signal."""

from collections.abc import Sequence

from headway.envs.base import SingleTurn, Task, reward


class Lottery(SingleTurn):
    def tasks(self) -> Sequence[Task]:
        return [Task(f"{number}", {"number": number}) for number in range(16)]

    def prompt(self, task: Task) -> str:
        return f"Draw {task.data['number']}."

    @reward
    def luck(self, answer: str) -> float:
        return float(sum(answer.encode()) % 2)
'''


def flags(seed: int, folder: Path, steps: int) -> list[str]:
    """Settings of one run, all drawn from the seed."""
    rng = random.Random(seed)
    group = rng.choice((2, 4))
    env = f"{folder / 'lottery.py'}:Lottery"
    curriculum = rng.choice(("shuffled", "in_order", "difficulty"))
    envs = (
        f'[{{id = "{env}", name = "first", curriculum = {{type = "{curriculum}"}}}}, '
        f'{{id = "{env}", name = "second", ratio = {rng.choice((0.5, 1.0, 2.0))}, '
        f"sampling = {{max_tokens = {rng.choice((4, 24))}}}}}]"
    )
    chosen = {
        "run.output_dir": folder,
        "run.name": f"run-{seed}",
        "seed": seed,
        "max_steps": steps,
        "model.path": "tiny",
        "seq_len": 128,
        "trainer.optim.lr": 1e-4,
        "trainer.checkpoints.interval": rng.choice((2, 3)),
        "trainer.checkpoints.keep_last": steps,
        "orchestrator.batch_size": group * rng.choice((3, 4, 6)),
        "orchestrator.group_size": group,
        "orchestrator.max_lag": rng.randint(1, 4),
        "orchestrator.run_ahead": rng.randint(0, 2),
        "orchestrator.algorithm.type": rng.choice(("grpo", "rloo", "reinforce_pp", "rae")),
        "orchestrator.sampling.max_tokens": rng.choice((8, 16)),
        "orchestrator.envs": envs,
    }
    return [word for name, value in chosen.items() for word in (f"--{name}", str(value))]


def run_with_kills(seed: int, folder: Path, steps: int) -> tuple[RunPaths, list[str]]:
    """Run it to its end; returns what was killed."""
    rng, paths, killed = random.Random(f"{seed}/kills"), RunPaths(folder / f"run-{seed}"), []
    process = headway("rl", *flags(seed, folder, steps))
    moments = sorted(rng.sample(range(1, steps), 3))
    for moment in moments:
        while _step(paths) < moment and process.poll() is None:
            time.sleep(0.05)
        time.sleep(rng.random() * 0.5)
        kind = rng.choice(VICTIMS)
        if victim := _find(process.pid, kind):
            victim.kill()
            killed.append(f"{kind.rpartition('.')[2]} at {_step(paths)}")
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"run {seed} failed:\n{output[-3000:]}")
    return paths, killed


def headway(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "headway.cli.main", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def replay(paths: RunPaths, *arguments: str) -> dict[str, Any]:
    process = headway("replay", str(paths.root), *arguments)
    output, _ = process.communicate()
    return {"identical": process.returncode == 0, "report": output.splitlines()[-3:]}


def _step(paths: RunPaths) -> int:
    return max((int(line["step"]) for line in read_metrics(paths.metrics / "trainer.jsonl")), default=0)


def _find(pid: int, kind: str) -> psutil.Process | None:
    try:
        family = psutil.Process(pid).children(recursive=True)
        return next((process for process in family if kind in process.cmdline()), None)
    except psutil.Error:
        return None


def check(seed: int, steps: int) -> dict[str, Any]:
    """Make the run of a seed and replay it twice."""
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        folder = Path(name)
        (folder / "lottery.py").write_text(ENVIRONMENT)
        paths, killed = run_with_kills(seed, folder, steps)
        checkpoints = paths.complete_checkpoints()
        middle = checkpoints[(len(checkpoints) - 1) // 2]
        result = {"seed": seed, "killed": killed, "start": replay(paths), "middle_step": middle}
        return result | {"middle": replay(paths, "--from-step", str(middle))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a run and its replays may take")
    parser.add_argument("--save", type=Path, help="write the results here, as JSON")
    parser.add_argument("--seed", type=int, help="make this run alone, and print its result")
    options = parser.parse_args()
    if options.seed is not None:
        print(json.dumps(check(options.seed, options.steps)))
        return
    results: list[dict[str, Any]] = []

    def told(outcome: Outcome) -> None:
        found = outcome.result or {"seed": int(outcome.case), "failed": outcome.failed}
        results.append(found | {"seconds": round(outcome.seconds, 1), "cores": len(outcome.cores)})
        print(json.dumps(results[-1]), flush=True)
        if options.save:
            options.save.write_text(json.dumps(sorted(results, key=lambda row: row["seed"]), indent=2) + "\n")

    seeds = range(options.first, options.first + options.runs)
    cases = [Case(f"{seed}", [__file__, "--seed", f"{seed}", "--steps", f"{options.steps}"]) for seed in seeds]
    run_cases(cases, options.parallel, options.limit, told, {"CUDA_VISIBLE_DEVICES": ""})
    good = sum(all(row.get(part, {}).get("identical") for part in ("start", "middle")) for row in results)
    print(f"{good} of {len(results)} runs replayed to the same bits, from the start and from a middle step")
    sys.exit(good < len(results))


if __name__ == "__main__":
    main()
