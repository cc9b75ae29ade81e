"""A forecast: what one layout of a run would do, from the orchestrator itself on simulated time."""

from dataclasses import dataclass, replace
from math import gcd

from headway.config.rl import RlSettings
from headway.plan.episodes import Workload
from headway.plan.speeds import Speeds
from headway.plan.virtual_time import run_virtually
from headway.plan.world import Observed, World, quiet

MOST_REPLIES = 1500
"""Replies that are simulated, unless the first steps alone have more."""
SMALLEST_BATCH, FEWEST_GROUPS = 64, 8
"""Of the part of a large run that is simulated."""
FEWEST_STEPS, MOST_STEPS = 5, 30
"""Steps that are measured, after those that the run needs to settle."""


@dataclass(frozen=True)
class Forecast:
    """Means over the steps of a run that has settled. Shares are of a step's time."""

    step_seconds: float
    training_seconds: float
    """Of it, those in which the trainer computes and publishes."""
    trainer_waiting: float
    engines_idle: float
    lag_mean: float
    lag_max: float
    aged: float
    """Share of episodes that are cancelled or dropped because they would be too old."""
    in_flight: float
    tokens_per_second: float
    """Sampled by all engines."""
    episode_engine_seconds: float


def forecast(settings: RlSettings, speeds: Speeds, workload: Workload, engines: int, seed: int = 0) -> Forecast:
    """Simulate a run of these settings with that many engines."""
    part = _part(settings, engines)
    options = settings.orchestrator.model_copy(update={"batch_size": settings.orchestrator.batch_size // part})
    engines //= part
    warm_up = min(options.max_lag, 3) + 2
    steps = warm_up + max(
        FEWEST_STEPS, min(MOST_STEPS, int(MOST_REPLIES / workload.turns) // options.batch_size - warm_up)
    )

    async def live() -> Observed:
        world = World(
            options,
            engines,
            speeds,
            workload,
            prefix_cache=settings.inference.prefix_cache,
            steps=steps,
            part=part,
            seed=seed,
        )
        return await world.live()

    with quiet():
        seen = summarize(run_virtually(live()), warm_up, engines)
    return replace(seen, in_flight=part * seen.in_flight, tokens_per_second=part * seen.tokens_per_second)


def _part(settings: RlSettings, engines: int) -> int:
    """Choose the part of a large run that is simulated: one of so many equal ones, which all do the same."""
    options = settings.orchestrator
    sizes = [options.group_size, *(env.group_size for env in options.envs if env.group_size)]
    parts = [
        part
        for part in range(1, gcd(engines, options.batch_size) + 1)
        if engines % part == 0
        and all(options.batch_size % (part * size) == 0 for size in sizes)
        and options.batch_size // part >= max(SMALLEST_BATCH, FEWEST_GROUPS * max(sizes))
    ]
    return max(parts, default=1)


def summarize(seen: Observed, warm_up: int, engines: int) -> Forecast:
    """Average over the steps after the first `warm_up`."""
    count = len(seen.finished_at) - warm_up
    seconds = seen.finished_at[-1] - seen.finished_at[warm_up - 1]
    waited = sum(seen.waited[warm_up:])
    (busy_then, sampled_then), (busy, sampled) = seen.busy[warm_up - 1], seen.busy[-1]
    later = slice(warm_up, warm_up + count)
    return Forecast(
        step_seconds=seconds / count,
        training_seconds=(seconds - waited) / count,
        trainer_waiting=waited / seconds,
        engines_idle=max(0.0, 1.0 - (busy - busy_then) / (engines * seconds)),
        lag_mean=_mean(seen.lags[later]),
        lag_max=max(seen.largest_lags[later]),
        aged=_mean(seen.dropped[later]),
        in_flight=_mean(seen.in_flight[later]),
        tokens_per_second=(sampled - sampled_then) / seconds,
        episode_engine_seconds=_mean(seen.engine_seconds[len(seen.engine_seconds) // 4 :]),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
