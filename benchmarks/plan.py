"""How good are plans? CPU runs of different shape, predicted from a calibration alone and then measured.

    python benchmarks/plan.py [--steps 24] [--only NAME ...] [--layouts]

Calibrates this machine, predicts the step time of each shape, runs it for real, and prints both; saves
benchmarks/results/plan.json. With --layouts each shape is also run with one engine more, and the plan must name the
faster of the two. Bars: step time within 20 % for ten of twelve shapes, and the better layout named right for ten of
twelve; layouts whose measured times differ by less than 5 % count as equal, and either answer as right. The machine
must be idle. Exits with 1 where a bar does not hold.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from headway.config.loader import load_settings
from headway.config.rl import RlSettings
from headway.core.runs import RunPaths
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.monitor.metrics import read_metrics
from headway.plan.calibration import Calibration, calibrate
from headway.plan.episodes import Shape, Turn, Workload
from headway.plan.forecast import forecast

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plan.json"
WITHIN, RIGHT, OF = 0.2, 10, 12
EQUAL = 0.05
PROMPT = 20


@dataclass(frozen=True)
class RunShape:
    """One run: at most `reply` tokens, then an environment that takes `seconds` (the median) with a log-normal tail."""

    name: str
    reply: int = 16
    seconds: float = 0.0
    sigma: float = 0.0
    batch: int = 64
    group: int = 8
    max_lag: int = 4
    engines: int = 1
    slots: int = 64


SHAPES = [
    RunShape("short"),
    RunShape("long replies", reply=128),
    RunShape("on-policy", max_lag=0, reply=64),
    RunShape("slow environment", seconds=1.0),
    RunShape("slow environment, on-policy", seconds=1.0, max_lag=0),
    RunShape("long tail", seconds=1.0, sigma=1.0),
    RunShape("long tail, on-policy", seconds=1.0, sigma=1.0, max_lag=0),
    RunShape("long tail, lag 1", seconds=0.5, sigma=1.0, max_lag=1, group=4),
    RunShape("large batch", batch=128, group=16, reply=32),
    RunShape("few slots", reply=64, slots=16),
    RunShape("two engines", reply=128, engines=2),
    RunShape("three engines, long replies", reply=192, engines=3, slots=96),
]


def settings_of(shape: RunShape, engines: int, steps: int) -> list[str]:
    """The flags of a run of a model that has learned nothing: every group is trained, whatever its rewards."""
    env = {
        "id": f"{ROOT}/benchmarks/async_parts/long_tail.py:LongTail",
        "args": {"median": shape.seconds, "sigma": shape.sigma},
        "workers": {"max": 1, "episodes": 256},
    }
    slots = f"{{min = {shape.slots}, max = {shape.slots}, initial = {shape.slots}}}"
    flags = {
        "model.path": "tiny",
        "seq_len": "512",
        "max_steps": str(steps),
        "placement.engines": str(engines),
        "orchestrator.batch_size": str(shape.batch),
        "orchestrator.group_size": str(shape.group),
        "orchestrator.max_lag": str(shape.max_lag),
        "orchestrator.concurrency": slots,
        "orchestrator.sampling.max_tokens": str(shape.reply),
        "orchestrator.filters.zero_advantage": "false",
        "orchestrator.envs": f"[{inline(env)}]",
        "trainer.checkpoints.interval": "1000",
    }
    return [word for flag, value in flags.items() for word in (f"--{flag}", value)]


def inline(value: Any) -> str:
    """A value as TOML in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {inline(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def predict(shape: RunShape, engines: int, calibration: Calibration) -> float:
    settings = load_settings(RlSettings, settings_of(shape, engines, 24)).settings
    workload = Workload(list(draw_episodes(shape)))
    return forecast(settings, calibration.speeds(settings), workload, engines).step_seconds


def draw_episodes(shape: RunShape) -> Iterator[Shape]:
    """Draw what is known of the episodes beforehand: each token of an untrained model may end the reply."""
    config, rng = load_config(resolve_model("tiny")), random.Random(0)
    end = len(config.eos_ids) / config.vocab_size
    for _ in range(1024):
        tokens = next((n for n in range(1, shape.reply) if rng.random() < end), shape.reply)
        yield Shape.of(Turn(PROMPT, tokens, shape.seconds * rng.lognormvariate(0.0, shape.sigma)))


def measure(shape: RunShape, engines: int, steps: int, folder: Path) -> float:
    name = f"{shape.name.replace(' ', '-').replace(',', '')}-{engines}"
    place = ("--run.output_dir", str(folder), "--run.name", name)
    argv = [sys.executable, "-m", "headway.cli.main", "rl", *settings_of(shape, engines, steps), *place]
    subprocess.run(argv, check=True, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    times = [line["time"] for line in read_metrics(RunPaths(folder / name).metrics / "trainer.jsonl")]
    settled = times[len(times) // 4 :]
    return float((settled[-1] - settled[0]) / (len(settled) - 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="steps of each run")
    parser.add_argument("--only", nargs="*", default=[], help="shapes by name")
    parser.add_argument("--layouts", action="store_true", help="run every shape with one engine more, too")
    options = parser.parse_args()
    shapes = [shape for shape in SHAPES if not options.only or shape.name in options.only]
    calibration = calibrate(load_settings(RlSettings, settings_of(shapes[0], 1, 24)).settings, print)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for shape in shapes:
            row: dict[str, Any] = asdict(shape)
            layouts = (shape.engines, shape.engines + 1) if options.layouts else (shape.engines,)
            predicted = [predict(shape, engines, calibration) for engines in layouts]
            measured = [measure(shape, engines, options.steps, Path(name)) for engines in layouts]
            row |= {"predicted": predicted[0], "measured": measured[0], "error": predicted[0] / measured[0] - 1}
            if options.layouts:
                equal = abs(measured[1] / measured[0] - 1) < EQUAL
                row |= {"predicted_more": predicted[1], "measured_more": measured[1]}
                row["right"] = equal or (predicted[1] < predicted[0]) == (measured[1] < measured[0])
            rows.append(row)
            right = {True: "right", False: "wrong"}.get(row.get("right"), "")
            print(
                f"{shape.name:<30} {predicted[0]:8.3f} s {measured[0]:8.3f} s {row['error']:+7.0%}  {right}", flush=True
            )
    return report(rows, calibration)


def report(rows: list[dict[str, Any]], calibration: Calibration) -> int:
    near = sum(abs(row["error"]) <= WITHIN for row in rows)
    right = sum(row.get("right", False) for row in rows)
    print(f"{near} of {len(rows)} within {WITHIN:.0%}; mean error {fmean(abs(row['error']) for row in rows):.0%}")
    whole = len(rows) == OF
    holds = near >= RIGHT
    if "right" in rows[0]:
        print(f"{right} of {len(rows)} layouts named right")
        holds = holds and right >= RIGHT
    if not whole:
        print(f"not all {OF} shapes were run, so nothing is saved")
        return 0
    RESULTS.write_text(json.dumps({"cores": calibration.cores, "rows": rows}, indent=2) + "\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
