"""Speeds fitted to a run: what it measured decides how much slower than expected its engines and trainer are."""

from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

import msgspec

from headway.base.errors import UsageError
from headway.config.rl import RlSettings
from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics
from headway.plan.episodes import Workload
from headway.plan.forecast import forecast
from headway.plan.speeds import Speeds

ROUNDS = 3
FEWEST_STEPS = 4


class Measured(msgspec.Struct, frozen=True):
    """A run's own figures, as means over its steps after the first ones."""

    step_seconds: float
    training_seconds: float
    publish_seconds: float
    update_seconds: float
    episode_engine_seconds: float
    lag_mean: float


def measured(paths: RunPaths) -> Measured:
    """Read a run's metrics. Raises UsageError where it has too few steps."""
    trainer, orchestrator = (
        [line for line in read_metrics(paths.metrics / f"{name}.jsonl") if line.get("step_seconds")]
        for name in ("trainer", "orchestrator")
    )
    if min(len(trainer), len(orchestrator)) < FEWEST_STEPS:
        raise UsageError(
            f"{paths.root} has {len(trainer)} trained steps, a plan needs {FEWEST_STEPS} at least; let it go on"
        )
    later, batches = trainer[len(trainer) // 4 :], orchestrator[len(orchestrator) // 4 :]
    return Measured(
        step_seconds=_usual([after["time"] - before["time"] for before, after in pairwise(later)]),
        # Averaged over the same steps: else a few slow ones would look like time in which nobody works.
        training_seconds=_usual([line["step_seconds"] for line in later[1:]]),
        publish_seconds=_usual([line.get("publish_seconds") or 0.0 for line in later[1:]]),
        update_seconds=median([line.get("weights/update_seconds") or 0.0 for line in batches]),
        episode_engine_seconds=fmean([line.get("episode_seconds/engine") or 0.0 for line in batches]),
        lag_mean=fmean([line.get("lag/mean") or 0.0 for line in batches]),
    )


def _usual(values: list[float]) -> float:
    """The mean without the largest: evaluations and checkpoints between some steps are no part of the others."""
    return fmean(sorted(values)[: max(1, len(values) - len(values) // 20)])


def fit_to_run(settings: RlSettings, speeds: Speeds, workload: Workload, seen: Measured) -> Speeds:
    """Make engine and trainer slower or faster until a forecast of the run takes as long for training and for replies
    as the run did. What then comes out for a step is still a prediction."""
    engine = replace(speeds.engine, update_seconds=seen.update_seconds)
    trainer = replace(speeds.trainer, publish_seconds=seen.publish_seconds)
    speeds = replace(speeds, engine=engine, trainer=trainer)
    for _ in range(ROUNDS):
        expected = forecast(settings, speeds, workload, settings.placement.engines)
        training = _ratio(
            seen.training_seconds - seen.publish_seconds, expected.training_seconds - seen.publish_seconds
        )
        replies = _ratio(seen.episode_engine_seconds, expected.episode_engine_seconds)
        speeds = replace(speeds, engine=speeds.engine.times(replies), trainer=speeds.trainer.times(training))
    return speeds


def _ratio(seen: float, expected: float) -> float:
    return min(max(seen / expected, 0.1), 10.0) if seen > 0 and expected > 0 else 1.0
