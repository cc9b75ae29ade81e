"""Does asynchrony pay? The same run fully on-policy (lag 0) and asynchronous (lag <= 2), on episodes with a long tail.

    python benchmarks/async.py [--steps 30] [--median 0.5] [--sigma 1.0] [--model FOLDER]
    python benchmarks/async.py --simulated 6      # on simulated time, mean of six seeds; saves async_simulated.json

Both train the same number of steps from the same warmed-up model, with the same room for episodes in flight. Prints
wall time, the final policy's reward on held-out words and how idle each side was; saves benchmarks/results/async.json
and docs/images/async.png. Bar: the asynchronous run is at least 6 times as fast, with the final reward within noise.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from async_parts.picture import draw
from async_parts.simulation import table
from async_parts.warm_up import headway, warm_up
from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics

ROOT = Path(__file__).parents[1]
BAR = 6.0
LAGS = (0, 2)
SLOTS = 256
"""Episodes that may be in flight, in both runs."""
SIMULATED = [(0, 0.1), (1, 0.1), (2, 0.0), (2, 0.1), (2, 0.2)]
"""Pairs of max_lag and max_lost_share."""
HELD_OUT = 512
"""Words that the final policies are compared on."""


def train(folder: Path, model: Path, lag: int, options: argparse.Namespace) -> RunPaths:
    paths = RunPaths(folder / f"lag-{lag}")
    latency = f"median = {options.median}, sigma = {options.sigma}"
    # One process holds every episode: they wait far more than they work.
    env = (
        f'{{id = "{ROOT}/benchmarks/async_parts/long_tail.py:LongTail", args = {{{latency}}}, '
        f"workers = {{max = 1, episodes = {SLOTS}}}}}"
    )
    held_out = f'{{id = "reverse-text", name = "held-out", args = {{split = "eval"}}, tasks = {HELD_OUT}}}'
    headway(
        *("rl", "@", str(ROOT / "examples/reverse_text/rl.toml"), "--model.path", str(model)),
        *("--run.output_dir", str(folder), "--run.name", paths.root.name, "--max_steps", str(options.steps)),
        *("--orchestrator.envs", f"[{env}]"),
        *("--orchestrator.eval.envs", f"[{held_out}]", "--orchestrator.eval.at_start", "false"),
        *("--orchestrator.max_lag", str(lag), "--orchestrator.run_ahead", str(min(lag, 1))),
        *("--orchestrator.concurrency.initial", str(SLOTS), "--orchestrator.concurrency.max", str(SLOTS)),
    )
    return paths


def measure(paths: RunPaths, lag: int) -> dict[str, Any]:
    trainer = list(read_metrics(paths.metrics / "trainer.jsonl"))
    rollouts = [line for line in read_metrics(paths.metrics / "orchestrator.jsonl") if "batch/groups" in line]
    # From the first trained step on: starting three processes is not what is compared.
    wall = trainer[-1]["time"] - trainer[0]["time"]
    reward, error = final_reward(paths)
    return {
        "max_lag": lag,
        "wall_seconds": wall,
        "final_reward": reward,
        "final_reward_error": error,
        "trainer_idle_share": sum(line["wait_seconds"] for line in trainer[1:]) / wall,
        "rollouts_idle_share": 1 - mean_in_flight(rollouts) / SLOTS,
        "mean_lag": fmean(line["lag/mean"] for line in rollouts),
        "too_old_share": sum(line.get("cancelled/too_old", 0.0) + line.get("dropped/stale", 0.0) for line in rollouts)
        / sum(line["episodes"] for line in rollouts),
        "curve": [(line["time"] - rollouts[0]["time"], line["reward/mean"]) for line in rollouts],
    }


def final_reward(paths: RunPaths) -> tuple[float, float]:
    """The last policy's mean reward on held-out words, and the standard error of that mean."""
    file = max(paths.evaluations.glob("*"))
    rewards = [reward for line in file.read_text().splitlines() for reward in json.loads(line)["rewards"]]
    return fmean(rewards), stdev(rewards) / math.sqrt(len(rewards))


def mean_in_flight(rollouts: list[dict[str, Any]]) -> float:
    """Over time: steps weigh as much as they lasted. The first one is the start."""
    seconds = sum(line["step_seconds"] for line in rollouts[1:])
    return float(sum(line["in_flight"] * line["step_seconds"] for line in rollouts[1:]) / seconds)


def show(rows: list[dict[str, Any]]) -> None:
    columns = ("wall", "held-out reward", "trainer idle", "episode slots idle", "mean lag", "too old")
    print("         " + "  ".join(columns))
    for row in rows:
        values = (
            f"{row['wall_seconds']:.0f} s",
            f"{row['final_reward']:.3f} ± {row['final_reward_error']:.3f}",
            f"{row['trainer_idle_share']:.0%}",
            f"{row['rollouts_idle_share']:.0%}",
            f"{row['mean_lag']:.2f}",
            f"{row['too_old_share']:.0%}",
        )
        cells = (value.rjust(len(name)) for name, value in zip(columns, values, strict=True))
        print(f"lag <= {row['max_lag']} " + "  ".join(cells))


def simulated(options: argparse.Namespace) -> int:
    print("max_lag  max_lost_share    wall  ratio  too old  trainer idle  mean lag")
    rows = []
    episodes = {"median": options.median, "sigma": options.sigma}
    for row in table(SIMULATED, options.simulated, slots=SLOTS, steps=options.steps, **episodes):
        rows.append(row)
        print(
            f"{row['max_lag']:7}  {row['max_lost_share']:14}  {row['wall_seconds']:4.0f} s  {row['ratio']:5.2f}  "
            f"{row['too_old_share']:7.1%}  {row['trainer_idle_share']:12.0%}  {row['mean_lag']:8.2f}"
        )
    results = {"seeds": options.simulated, "steps": options.steps, **episodes, "slots": SLOTS, "runs": rows}
    (ROOT / "benchmarks/results/async_simulated.json").write_text(json.dumps(results, indent=2) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--median", type=float, default=0.5, help="median seconds of an episode")
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of their logarithm")
    parser.add_argument("--model", type=Path, help="a warmed-up model; made first where none is given")
    parser.add_argument("--simulated", type=int, metavar="SEEDS", help="simulate instead, with so many seeds")
    options = parser.parse_args()
    if options.simulated:
        return simulated(options)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = options.model or warm_up(folder)
        rows = [measure(train(folder, model, lag, options), lag) for lag in LAGS]
    show(rows)
    ratio = rows[0]["wall_seconds"] / rows[1]["wall_seconds"]
    lost = rows[0]["final_reward"] - rows[1]["final_reward"]
    noise = 2 * math.hypot(*(row["final_reward_error"] for row in rows))
    print(f"asynchronous is {ratio:.2f} times as fast (bar: {BAR}), its reward {-lost:+.3f} (noise: ±{noise:.3f})")
    draw(rows, [row.pop("curve") for row in rows], ROOT / "docs/images/async.png")
    setting = {"steps": options.steps, "median_seconds": options.median, "sigma": options.sigma, "slots": SLOTS}
    results = {**setting, "ratio": ratio, "reward_lost": lost, "noise": noise, "runs": rows}
    (ROOT / "benchmarks/results/async.json").write_text(json.dumps(results, indent=2) + "\n")
    return 0 if ratio >= BAR and lost <= noise else 1


if __name__ == "__main__":
    sys.exit(main())
