"""How good are plans? Runs of different shape, predicted from a calibration alone and then measured.

    python benchmarks/plan.py --layouts --parallel 8 --save benchmarks/results/plan.json
    python benchmarks/plan.py --device cuda --save benchmarks/results/plan_cuda.json

Calibrates this machine, predicts the step time of each shape, runs it for real, and prints both. On CPUs there are
twelve shapes; with --layouts each is also run with one engine more, and the plan must name the faster of the two. With
--parallel, so many runs go on beside each other, each on cores of its own; the calibration is done on all of them at
the same time, and its figures are the medians. With --device cuda three shapes of a model of 0.6B run on one GPU.

Bars: step time within 20 % for ten of twelve shapes (all three on a GPU), and the better layout named right for ten of
twelve; layouts whose measured times differ by less than 5 % count as equal, and either answer as right. Nothing else
may run on the machine. Exits with 1 where a bar does not hold.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from engine_parts.work import model_folder
from headway.config.loader import load_settings
from headway.config.rl import RlSettings
from headway.core.runs import RunPaths
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.monitor.metrics import read_metrics
from headway.plan.calibration import Calibration, calibrate
from headway.plan.episodes import Shape, Turn, Workload
from headway.plan.fitting import measured
from headway.plan.forecast import Forecast, forecast
from lanes import Case, Outcome, divide_cores, pinning_works, run_cases

ROOT = Path(__file__).parents[1]
WITHIN = 0.2
EQUAL = 0.05
PROMPT = 12
"""Tokens of the environment's prompts, on the mean."""
LIMIT = 300.0
"""Seconds that a run may take."""
RUN_SECONDS = 180.0
"""Seconds that a run should take: those with slow steps do fewer of them, but not less than half."""


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
    model: str = "tiny"


CPU_SHAPES = [
    RunShape("short"),
    RunShape("long replies", reply=128),
    RunShape("on-policy", max_lag=0, reply=64),
    RunShape("slow environment", seconds=1.0),
    RunShape("slow environment, on-policy", seconds=1.0, max_lag=0),
    RunShape("long tail", seconds=1.0, sigma=1.0),
    RunShape("long tail, on-policy", seconds=0.5, sigma=0.7, max_lag=0),
    RunShape("long tail, lag 1", seconds=0.5, sigma=1.0, max_lag=1, group=4),
    RunShape("large batch", batch=128, group=16, reply=32),
    RunShape("few slots", reply=64, slots=16),
    RunShape("two engines", reply=128, engines=2),
    RunShape("three engines, long replies", reply=192, engines=3, slots=96),
]
GPU_SHAPES = [
    RunShape("0.6B", reply=128, model="qwen3-0.6b"),
    RunShape("0.6B, on-policy", reply=128, max_lag=0, model="qwen3-0.6b"),
    RunShape("0.6B, long replies", reply=400, seconds=0.5, sigma=0.5, batch=32, max_lag=2, model="qwen3-0.6b"),
]
"""Random weights that do not know when to end a reply: all have the same length."""


def settings_of(shape: RunShape, engines: int, steps: int, device: str = "cpu") -> list[str]:
    """The flags of a run of a model that has learned nothing: every group is trained, whatever its rewards."""
    env = {
        "id": f"{ROOT}/benchmarks/async_parts/long_tail.py:LongTail",
        "args": {"median": shape.seconds, "sigma": shape.sigma},
        "workers": {"max": 1, "episodes": 256},
    }
    slots = f"{{min = {shape.slots}, max = {shape.slots}, initial = {shape.slots}}}"
    flags = {
        "model.path": shape.model,
        "placement.device": device,
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


def load(shape: RunShape, engines: int, options: argparse.Namespace) -> RlSettings:
    return load_settings(RlSettings, settings_of(shape, engines, options.steps, options.device)).settings


def predict(shape: RunShape, engines: int, calibration: Calibration, options: argparse.Namespace) -> Forecast:
    settings = load(shape, engines, options)
    return forecast(settings, calibration.speeds(settings), Workload(list(draw_episodes(shape))), engines)


def draw_episodes(shape: RunShape) -> Iterator[Shape]:
    """Draw what is known of the episodes beforehand: each token of an untrained model may end the reply."""
    config, rng = load_config(resolve_model(shape.model)), random.Random(0)
    end = len(config.eos_ids) / config.vocab_size
    for _ in range(1024):
        tokens = next((n for n in range(1, shape.reply) if rng.random() < end), shape.reply)
        yield Shape.of(Turn(PROMPT, tokens, shape.seconds * rng.lognormvariate(0.0, shape.sigma)))


def measure(shape: RunShape, engines: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run it, and return what it took."""
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        place = ("--run.output_dir", folder, "--run.name", "run")
        flags = settings_of(shape, engines, options.steps, options.device)
        argv = [sys.executable, "-m", "headway.cli.main", "rl", *flags, *place]
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(done.stdout[-3000:])
        paths = RunPaths(Path(folder) / "run")
        times = [line["time"] for line in read_metrics(paths.metrics / "trainer.jsonl")]
        # At the end the trainer works off what is queued, while engines have nothing left to do.
        settled = times[len(times) // 4 : len(times) - min(shape.max_lag, len(times) // 4)]
        own = msgspec.to_builtins(measured(paths))
        tokens = [line.get("batch/tokens", 0.0) for line in read_metrics(paths.metrics / "orchestrator.jsonl")]
    own["step_seconds"] = (settled[-1] - settled[0]) / (len(settled) - 1)
    return {"steps": options.steps, "tokens": fmean(tokens), **own, "times": [time - times[0] for time in times]}


def merged(found: Sequence[Calibration]) -> Calibration:
    """One calibration whose figures are the medians of several."""

    def middle(parts: Sequence[Any]) -> Any:
        names = parts[0].__struct_fields__
        return type(parts[0])(**{name: median(getattr(part, name) for part in parts) for name in names})

    host = median(one.host for one in found)
    whole = msgspec.structs.replace(found[0], engine=middle([one.engine for one in found]), host=host)
    return msgspec.structs.replace(whole, trainer=middle([one.trainer for one in found]))


def as_case(name: str, do: str, shape: RunShape, engines: int, steps: int, device: str) -> Case:
    flags = {"--do": do, "--shape": json.dumps(asdict(shape)), "--engines": engines, "--steps": steps}
    return Case(name, [__file__, "--device", device, *(f"{word}" for pair in flags.items() for word in pair)])


def do_case(options: argparse.Namespace) -> None:
    """Be one case: print a calibration, or what a run took."""
    shape = RunShape(**json.loads(options.shape))
    if options.do == "calibrate":
        print(msgspec.json.encode(calibrate(load(shape, options.engines, options), print)).decode())
    else:
        print(json.dumps(measure(shape, options.engines, options)))


class Benchmark:
    """Calibrations, then runs, `parallel` at a time. What is known is saved after each."""

    def __init__(self, shapes: Sequence[RunShape], options: argparse.Namespace) -> None:
        self.shapes, self.options = shapes, options
        self.layouts = (0, 1) if options.layouts else (0,)
        self.rows: dict[tuple[str, int], dict[str, Any]] = {}
        self.head: dict[str, Any] = {"device": options.device, "cores": len(divide_cores(options.parallel)[0])}
        self.head |= {"parallel": options.parallel, "pinned": pinning_works()}
        if not self.head["pinned"]:
            print("processes do not stay on the cores they are given here: runs beside each other disturb each other")

    def run(self) -> int:
        calibration = self._calibrate()
        for shape in self.shapes:
            for more in self.layouts:
                expected = predict(shape, shape.engines + more, calibration, self.options)
                row = {"shape": asdict(shape), "engines": shape.engines + more, "forecast": asdict(expected)}
                self.rows[shape.name, more] = row
        self.rows = dict(sorted(self.rows.items(), key=lambda item: -self._seconds(item[1])))
        cases = [self._case(name, more) for name, more in self.rows]
        run_cases(cases, self.options.parallel, LIMIT, self._measured, self._environment())
        return self._report()

    def _environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ""} if self.options.device == "cpu" else {}

    def _calibrate(self) -> Calibration:
        options = self.options
        print(f"calibrating {options.parallel} times at once, {self.head['cores']} cores each", flush=True)
        cases = [as_case("calibration", "calibrate", self.shapes[0], 1, 24, options.device)] * options.parallel
        outcomes = run_cases(cases, options.parallel, LIMIT, lambda outcome: None, self._environment())
        found = [outcome.result for outcome in outcomes if outcome.result]
        if not found:
            sys.exit(outcomes[0].failed)
        self.head["calibrations"] = found
        calibration = merged([msgspec.convert(one, Calibration) for one in found])
        print("\n".join(calibration.lines()), flush=True)
        return calibration

    def _steps(self, row: dict[str, Any]) -> int:
        most: int = self.options.steps
        return max(most // 2, min(most, int(RUN_SECONDS / row["forecast"]["step_seconds"])))

    def _seconds(self, row: dict[str, Any]) -> float:
        return float(self._steps(row) * row["forecast"]["step_seconds"])

    def _case(self, name: str, more: int) -> Case:
        row = self.rows[name, more]
        shape = RunShape(**row["shape"])
        return as_case(f"{name}/{more}", "measure", shape, row["engines"], self._steps(row), self.options.device)

    def _measured(self, outcome: Outcome) -> None:
        name, _, more = outcome.case.rpartition("/")
        row = self.rows[name, int(more)]
        row |= {"wall_seconds": round(outcome.seconds, 1), "cores": outcome.cores}
        expected = row["forecast"]["step_seconds"]
        if outcome.result is None:
            row["failed"] = outcome.failed
            print(f"{name}, {row['engines']} engines FAILED: {outcome.failed}", flush=True)
        else:
            row["measured"], seen = outcome.result, outcome.result["step_seconds"]
            row["error"] = expected / seen - 1
            text = f"{name + ', engines ' + str(row['engines']):<42} {expected:8.3f} s {seen:8.3f} s"
            print(f"{text} {row['error']:+7.0%}   ({outcome.seconds:.0f} s)", flush=True)
        self._save()

    def _save(self) -> None:
        if self.options.save:
            self.options.save.write_text(json.dumps(self.head | {"rows": list(self.rows.values())}, indent=1) + "\n")

    def _report(self) -> int:
        """Count what is near enough, and layouts that were named right."""
        own = [row["error"] for (_, more), row in self.rows.items() if not more and "error" in row]
        near = sum(abs(error) <= WITHIN for error in own)
        off = fmean(map(abs, own)) if own else 0.0
        print(f"{near} of {len(self.shapes)} within {WITHIN:.0%}; mean error {off:.0%}")
        self.head |= {"within_20_percent": near, "mean_error": off}
        bar = -(-len(self.shapes) * 10 // 12)
        holds = near >= bar
        if self.options.layouts:
            right = sum(self._named_right(shape.name) for shape in self.shapes)
            print(f"{right} of {len(self.shapes)} layouts named right")
            self.head["layouts_named_right"] = right
            holds = holds and right >= bar
        self._save()
        return 0 if holds else 1

    def _named_right(self, name: str) -> bool:
        pair = [self.rows[name, more] for more in self.layouts]
        if any("measured" not in row for row in pair):
            return False
        one, more = (row["measured"]["step_seconds"] for row in pair)
        expected_one, expected_more = (row["forecast"]["step_seconds"] for row in pair)
        right = bool(abs(more / one - 1) < EQUAL or (expected_more < expected_one) == (more < one))
        if not right:
            print(f"wrong: {name}: {expected_one:.3f} -> {expected_more:.3f} s, measured {one:.3f} -> {more:.3f} s")
        return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="steps of each run")
    parser.add_argument("--only", nargs="*", default=[], help="shapes by name")
    parser.add_argument("--layouts", action="store_true", help="run every shape with one engine more, too")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--save", type=Path, help="write the results here, as JSON")
    parser.add_argument("--do", choices=("calibrate", "measure"), help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--engines", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        do_case(options)
        return 0
    known = CPU_SHAPES if options.device == "cpu" else GPU_SHAPES
    shapes = [shape for shape in known if not options.only or shape.name in options.only]
    with tempfile.TemporaryDirectory(prefix="plan-") as name:
        folder = Path(name)
        os.environ["HEADWAY_CACHE"] = str(folder / "cache")
        models = {shape.model: str(model_folder(shape.model, folder, "cpu")) for shape in shapes}
        return Benchmark([replace(shape, model=models[shape.model]) for shape in shapes], options).run()


if __name__ == "__main__":
    sys.exit(main())
