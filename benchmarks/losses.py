"""Which loss learns where two versions of the weights are two policies, as in FP8, whatever they learned?

    python benchmarks/losses.py [--steps 100] [--seeds 2] [--size 0.11] [--losses dppo "dppo cap=1.3" cispo]

The quickstart's model reverses words at lag <= 2, with weights that are disturbed anew in every version, on both sides
alike. The mismatch of an older token is then what SmolLM2's is in FP8 (docs/precision.md). Compared with the same at
lag 0, where nothing is older, and without a disturbance. Prints rewards and saves benchmarks/results/losses.json.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from async_parts.warm_up import headway, warm_up
from gpu_parts.cases import table
from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics

ROOT = Path(__file__).parents[1]
RULE = f"{ROOT}/benchmarks/loss_parts/disturbed.py:DisturbedAdamW"
CAPPED = "dppo cap=1.3"
COLUMNS = ("mismatch KL", "masked", "reward 50 to 75 %", "last 25 %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--size", type=float, default=0.11, help="of the disturbance (%(default)s)")
    parser.add_argument("--losses", nargs="+", default=["dppo", CAPPED, "ppo_clip", "cispo", "tis"])
    parser.add_argument("--save", type=Path, default=ROOT / "benchmarks/results/losses.json")
    options = parser.parse_args()
    runs = [("dppo", 0.0, 2), (CAPPED, 0.0, 2), ("dppo", options.size, 0)]
    runs += [(loss, options.size, 2) for loss in options.losses]
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = warm_up(folder)
        for loss, size, lag in runs:
            seeds = [train(folder, model, loss, size, lag, seed, options.steps) for seed in range(options.seeds)]
            found.append({"loss": loss, "size": size, "max_lag": lag, "seeds": seeds})
            options.save.write_text(json.dumps({"steps": options.steps, "rows": found}, indent=1) + "\n")
    rows = [
        (
            row["loss"],
            row["size"],
            row["max_lag"],
            *(fmean(seed[column] for seed in row["seeds"]) for column in COLUMNS),
        )
        for row in found
    ]
    print(table(("loss", "disturbance", "lag", *COLUMNS), rows))


def train(folder: Path, model: Path, loss: str, size: float, lag: int, seed: int, steps: int) -> dict[str, float]:
    run = RunPaths(folder / f"{loss}-{size}-{lag}-{seed}".translate(str.maketrans(" =", "--")))
    kind, *settings = loss.split()
    flags = {
        "model.path": model,
        "run.output_dir": folder,
        "run.name": run.root.name,
        "seed": seed,
        "max_steps": steps,
        "orchestrator.max_lag": lag,
        "trainer.loss.type": kind,
        **{f"trainer.loss.{setting.partition('=')[0]}": setting.partition("=")[2] for setting in settings},
        "trainer.optim": f'{{type = "custom", path = "{RULE}", lr = 1e-4, args = {{size = {size}}}}}',
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    headway("rl", "@", str(ROOT / "examples/reverse_text/rl.toml"), *words)
    training, rollouts = (list(read_metrics(run.metrics / f"{who}.jsonl")) for who in ("trainer", "orchestrator"))
    rewards = column(rollouts, "reward/mean")
    half, most = len(rewards) // 2, 3 * len(rewards) // 4
    figures = (
        fmean(column(training, "mismatch_kl")),
        fmean(column(training, "rl/masked")),
        fmean(rewards[half:most]),
        fmean(rewards[most:]),
    )
    return dict(zip(COLUMNS, figures, strict=True))


def column(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if line.get(name) is not None]


if __name__ == "__main__":
    main()
