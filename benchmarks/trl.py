"""The whole loop beside TRL's GRPOTrainer: the same model, prompts, replies a step and longest reply, on this machine.

    python benchmarks/trl.py [--model FOLDER] [--device cuda] [--python INTERPRETER]
                             [--replies 512] [--tokens 512] [--steps 10] [--trl-steps 5] [--save FILE]

INTERPRETER is one that has TRL (`pip install trl vllm` into an environment of its own); default: this one. Without TRL
there, Headway runs alone. TRL samples by vLLM in its own process on a GPU, and by `generate` on the CPU, where the
model is the tiny one and replies are few and short unless told otherwise. Headway runs at lag 0 and at lag <= 2. Prints
the median seconds of a step and tokens per second, each side alone on the machine, one after the other.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from headway.core.runs import RunPaths
from headway.models.tiny import resolve_model
from headway.monitor.metrics import read_metrics

ROOT = Path(__file__).parents[1]
GROUP = 16
DEFAULT_REPLIES = {"cpu": 64, "cuda": 512}
DEFAULT_TOKENS = {"cpu": 32, "cuda": 512}
AT_ONCE = {"cpu": 16, "cuda": 128}
"""Replies in a micro-batch of Headway's trainer. On a GPU many: launching the kernels of one takes 0.1 s of a small
model, whatever its size. TRL has its own number, `--micro-batch`."""
WARM_UP = 2
"""Steps that are not counted: kernels are compiled and memory is found in them."""


def ours(options: argparse.Namespace, folder: Path, lag: int) -> dict[str, Any]:
    paths = RunPaths(folder / f"lag-{lag}")
    env = f'{{id = "trl_parts.story:Story", workers = {{max = 4, episodes = {options.replies}}}}}'
    cuda = options.device == "cuda"
    subprocess.run(
        [
            *(sys.executable, "-m", "headway.cli.main", "rl", "--model.path", str(options.model)),
            *("--run.output_dir", str(folder), "--run.name", paths.root.name, "--max_steps", str(options.steps)),
            *("--placement.device", options.device, "--trainer.optim.lr", "2e-5"),
            *("--seq_len", str(AT_ONCE[options.device] * (options.tokens + 128))),
            *(("--weights.type", "shared_memory", "--inference.kv_memory_gb", "24") if cuda else ()),
            *("--inference.engine", "embedded", "--inference.max_running", str(min(options.replies, 512))),
            *("--orchestrator.envs", f"[{env}]", "--orchestrator.sampling.max_tokens", str(options.tokens)),
            *("--orchestrator.batch_size", str(options.replies), "--orchestrator.group_size", str(GROUP)),
            *("--orchestrator.max_lag", str(lag), "--orchestrator.concurrency.initial", str(options.replies)),
        ],
        check=True,
        cwd=Path(__file__).parent,
    )
    lines = list(read_metrics(paths.metrics / "trainer.jsonl"))
    sampled = [line["sampled_tokens"] for line in lines[WARM_UP:]]
    return row(f"Headway, lag <= {lag}" if lag else "Headway, lag 0", [line["time"] for line in lines], sampled)


def theirs(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    given = {
        **{name: getattr(options, name) for name in ("device", "replies", "tokens", "micro_batch")},
        "steps": options.trl_steps or options.steps,
        "model": str(options.model),
        "folder": str(folder / "trl"),
        "group": GROUP,
        "checkpointing": options.device == "cuda",
    }
    script = str(ROOT / "benchmarks/trl_parts/grpo.py")
    done = subprocess.run(
        [options.python, script, json.dumps(given)], stdout=subprocess.PIPE, text=True, check=True, cwd=folder
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"time"')]
    sampled = [line["length"] * options.replies for line in lines[WARM_UP:]]
    return row("TRL", [line["time"] for line in lines], sampled)


def has_trl(python: str) -> bool:
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('trl') is None)"
    return subprocess.run([python, "-c", find], check=False).returncode == 0


def row(name: str, times: list[float], sampled: list[float]) -> dict[str, Any]:
    seconds = [after - before for before, after in pairwise(times[WARM_UP - 1 :])]
    step = median(seconds)
    return {"name": name, "step_seconds": step, "sampled_tokens": median(sampled), "rate": median(sampled) / step}


def contenders(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    yield ours(options, folder, 2)
    yield ours(options, folder, 0)
    if has_trl(options.python):
        yield theirs(options, folder)
    else:
        print(f"{options.python} has no TRL: name another interpreter with --python to compare")


def save(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.save:
        setting = {"device": options.device, "replies": options.replies, "tokens": options.tokens}
        options.save.write_text(json.dumps({**setting, "rows": rows}, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: the tiny model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--replies", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--micro-batch", type=int, default=16, help="replies that TRL trains at once")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trl-steps", type=int, help="fewer steps of TRL, where they take long; default: as many")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    options.model = (options.model or resolve_model("tiny")).resolve()
    options.replies = options.replies or DEFAULT_REPLIES[options.device]
    options.tokens = options.tokens or DEFAULT_TOKENS[options.device]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for each in contenders(options, Path(temporary)):
            rows.append(each)
            save(rows, options)
    for each in rows:
        ratio, other = rows[-1]["step_seconds"] / each["step_seconds"], rows[-1]["name"]
        print(
            f"{each['name']:18} {each['step_seconds']:8.2f} s a step  {each['sampled_tokens']:9.0f} tokens sampled  "
            f"{each['rate']:9.0f} tokens/s  {ratio:5.2f} times {other}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
