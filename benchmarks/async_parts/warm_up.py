"""The quickstart's model, warmed up for benchmarks that train it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def headway(*arguments: str) -> None:
    # One thread a process: the model is so small that more would only wait for each other.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run([sys.executable, "-m", "headway.cli.main", *arguments], check=True, env=environment)


def warm_up(folder: Path) -> Path:
    data = folder / "demonstrations.jsonl"
    headway("env", "demos", "reverse-text", "-n", "20000", "--args.copy_share", "0.5", "-o", str(data))
    place = ("--run.output_dir", str(folder), "--run.name", "warm-up")
    headway("sft", "@", str(ROOT / "examples/warm_up.toml"), "--data.path", str(data), *place)
    return sorted((folder / "warm-up/exports").iterdir())[-1]
