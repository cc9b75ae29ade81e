"""What a step's line says about environments: where episodes spent their time, and workers that were lost."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack

import pytest

from headway.config.orchestrator import EnvSettings, WorkerSettings
from headway.core.episodes import Episode, Task
from headway.models.tiny import resolve_model
from headway.orchestrator.environments import WorkerPools
from headway.orchestrator.tally import StepTally


def test_time_of_episodes_is_split_between_engines_and_environment() -> None:
    tally = StepTally()
    for engine in (1.0, 3.0):
        timings = {"total": engine + 0.5, "engine": engine, "environment": 0.5}
        tally.saw_episode(Episode("e", "g", "env", Task("t"), timings=timings))
    tally.saw_episode(Episode("e", "g", "env", Task("t")))  # one that never began says nothing about time
    values = tally.values(seconds=1.0)
    assert values["episode_seconds/engine"] == 2.0 and values["episode_seconds/environment"] == 0.5


@pytest.mark.timeout(120)
def test_a_lost_worker_is_counted_once() -> None:
    async def body() -> list[dict[str, float]]:
        async with AsyncExitStack() as stack:
            pools = WorkerPools(stack, resolve_model("tiny"), "auto")
            pool = await pools.start(EnvSettings(id="reverse-text", workers=WorkerSettings(max=1)))
            seen = [pools.metrics()]
            os.kill(pool._workers[0].pid, signal.SIGKILL)
            for _ in range(3000):
                if pool.restarts:
                    break
                await asyncio.sleep(0.02)
            return [*seen, pools.metrics(), pools.metrics()]

    before, after, later = asyncio.run(body())
    assert before == {"workers/serving": 1.0, "workers/lost": 0.0, "workers/resumed_episodes": 0.0}
    assert after["workers/lost"] == 1.0 and later["workers/lost"] == 0.0
