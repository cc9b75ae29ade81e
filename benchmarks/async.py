"""Does asynchrony pay? The same run fully on-policy (lag 0) and asynchronous (lag <= 2), on episodes with a long tail.

    python benchmarks/async.py [--steps 40] [--median 1.0]

Both train the same number of steps from the same warmed-up model; prints wall time, final reward and how idle each
side was, and saves benchmarks/results/async.json. Bar: the asynchronous run is at least 1.8 times as fast, with the
final reward within noise.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics

ROOT = Path(__file__).parents[1]
BAR = 1.8


def headway(*arguments: str) -> float:
    """Run a command; how long it took."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "headway.cli.main", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def warm_up(folder: Path) -> Path:
    data = folder / "demonstrations.jsonl"
    headway("env", "demos", "reverse-text", "-n", "20000", "--args.copy_share", "0.5", "-o", str(data))
    place = ("--run.output_dir", str(folder), "--run.name", "warm-up")
    headway("sft", "@", str(ROOT / "examples/warm_up.toml"), "--data.path", str(data), *place)
    return sorted((folder / "warm-up/exports").iterdir())[-1]


def measure(folder: Path, model: Path, lag: int, steps: int, median: float) -> dict[str, Any]:
    paths = RunPaths(folder / f"lag-{lag}")
    env = f'{{id = "{ROOT}/benchmarks/async_parts/long_tail.py:LongTail", args = {{median = {median}}}}}'
    headway(
        *("rl", "@", str(ROOT / "examples/reverse_text/rl.toml"), "--model.path", str(model)),
        *("--run.output_dir", str(folder), "--run.name", paths.root.name, "--max_steps", str(steps)),
        *("--orchestrator.envs", f"[{env}]", "--orchestrator.eval.envs", "[]"),
        *("--orchestrator.max_lag", str(lag), "--orchestrator.run_ahead", str(min(lag, 1))),
        *("--orchestrator.concurrency.initial", "512"),
    )
    trainer = list(read_metrics(paths.metrics / "trainer.jsonl"))
    rollouts = list(read_metrics(paths.metrics / "orchestrator.jsonl"))
    # From the first trained step on: starting three processes is not what is compared.
    wall = trainer[-1]["time"] - trainer[0]["time"]
    last = [line["reward/mean"] for line in rollouts[-steps // 5 :]]
    return {
        "max_lag": lag,
        "wall_seconds": wall,
        "final_reward": sum(last) / len(last),
        "trainer_idle_share": sum(line["wait_seconds"] for line in trainer[1:]) / wall,
        "orchestrator_waited_share": sum(line["wait_for_trainer_seconds"] for line in rollouts[1:]) / wall,
        "mean_lag": sum(line["lag/mean"] for line in rollouts) / len(rollouts),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--median", type=float, default=1.0, help="median seconds of an episode")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = warm_up(Path(folder))
        rows = [measure(Path(folder), model, lag, options.steps, options.median) for lag in (0, 2)]
    print(f"{'':>8} {'wall':>9} {'reward':>7} {'trainer idle':>13} {'rollouts waited':>16} {'mean lag':>9}")
    for row in rows:
        print(
            f"lag <= {row['max_lag']} {row['wall_seconds']:>7.1f} s {row['final_reward']:>7.3f}"
            f" {row['trainer_idle_share']:>12.0%} {row['orchestrator_waited_share']:>15.0%} {row['mean_lag']:>9.2f}"
        )
    ratio = rows[0]["wall_seconds"] / rows[1]["wall_seconds"]
    print(f"asynchronous is {ratio:.2f} times as fast (bar: {BAR})")
    results = ROOT / "benchmarks/results/async.json"
    results.write_text(json.dumps({"steps": options.steps, "ratio": ratio, "runs": rows}, indent=2) + "\n")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
