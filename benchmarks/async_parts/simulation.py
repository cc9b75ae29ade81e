"""The same comparison on simulated time: the real orchestrator, with episodes and a trainer that take as long as they
are said to, whatever else the machine does."""

import random
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from headway.config.orchestrator import ConcurrencySettings, EnvSettings, OrchestratorSettings, WorkerSettings
from headway.plan.episodes import Shape, Turn, Workload
from headway.plan.speeds import LinearEngine, LinearTrainer, Speeds
from headway.plan.virtual_time import run_virtually
from headway.plan.world import Observed, World, quiet

BATCH, GROUP = 128, 8
STEP_SECONDS, UPDATE_SECONDS = 0.39, 0.1
"""What a step took in a real run on two quiet cores, and about what an update of the engine takes."""
USEFUL = 0.93
"""Share of groups whose rewards differ."""
DRAWN = 20_000


class CountingWorld(World):
    """A world that also counts all episodes, and those that became too old."""

    episodes = too_old = 0.0

    def log(self, step: int, values: dict[str, float]) -> None:
        super().log(step, values)
        self.episodes += values["episodes"]
        self.too_old += values.get("cancelled/too_old", 0.0) + values.get("dropped/stale", 0.0)


def simulate(*, max_lag: int, lost: float, slots: int, steps: int, median: float, sigma: float, seed: int) -> Any:
    """Return wall seconds, the share of episodes that became too old, the trainer's idle share and the mean lag."""
    rng = random.Random(seed)
    shapes = [Shape.of(Turn(20, 12, median * rng.lognormvariate(0.0, sigma))) for _ in range(DRAWN)]
    settings = OrchestratorSettings(
        batch_size=BATCH,
        group_size=GROUP,
        max_lag=max_lag,
        run_ahead=min(max_lag, 1),
        max_lost_share=lost,
        concurrency=ConcurrencySettings(initial=slots, max=slots),
        envs=[EnvSettings(id="long-tail", workers=WorkerSettings(max=1, episodes=slots))],
    )
    engine = LinearEngine(
        prefill_seconds=0.0, kv_tokens=10**7, max_running=slots, fixed=0.002, per_sequence=4e-5,
        admission_seconds=3e-4, update_seconds=UPDATE_SECONDS,
    )  # fmt: skip
    speeds = Speeds(engine, LinearTrainer(fixed=STEP_SECONDS, per_token=0.0))

    async def live() -> tuple[CountingWorld, Observed]:
        world = CountingWorld(settings, 1, speeds, Workload(shapes, USEFUL), prefix_cache=True, steps=steps, seed=seed)
        return world, await world.live()

    with quiet():
        world, seen = run_virtually(live())
    wall = seen.finished_at[-1] - seen.finished_at[0]
    return wall, world.too_old / world.episodes, sum(seen.waited[1:]) / wall, fmean(seen.lags)


def table(cases: list[tuple[int, float]], seeds: int, **options: Any) -> Iterator[dict[str, float]]:
    """Simulate each pair of `max_lag` and `max_lost_share` with several seeds; the first pair is compared with."""
    first = 0.0
    for max_lag, lost in cases:
        runs = [simulate(max_lag=max_lag, lost=lost, seed=seed, **options) for seed in range(seeds)]
        wall, too_old, idle, lag = (fmean(column) for column in zip(*runs, strict=True))
        first = first or wall
        yield {
            "max_lag": max_lag, "max_lost_share": lost, "wall_seconds": wall, "ratio": first / wall,
            "too_old_share": too_old, "trainer_idle_share": idle, "mean_lag": lag,
        }  # fmt: skip
