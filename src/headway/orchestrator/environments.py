"""Environments of a run: their worker pools, started together and closed with the run."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from headway.algorithms.base import Algorithm, Context
from headway.algorithms.registry import make_algorithm
from headway.base.errors import PermanentError, UsageError
from headway.config.orchestrator import EnvSettings, EvalEnvSettings, OrchestratorSettings, SamplingSettings
from headway.core.episodes import Task
from headway.core.protocol import SamplingParams
from headway.envs.workers.pool import EnvPool
from headway.orchestrator.environment_record import UsedEnvironment
from headway.orchestrator.evaluation import EvalEnv
from headway.orchestrator.groups.curriculum import make_curriculum
from headway.orchestrator.groups.sources import EpisodePool, RateLimit, Source
from headway.orchestrator.task_sets import select_tasks

T = TypeVar("T")


class WorkerPools:
    """Worker pools, closed with the stack. Their workers show `token` to engines."""

    def __init__(
        self, stack: AsyncExitStack, model: Path, renderer: str, family: str | None = None, token: str | None = None
    ) -> None:
        self._stack, self._model, self._renderer, self._family = stack, model, renderer, family
        self._token = token
        self._pools: list[EnvPool] = []
        self._lost, self._resumed = 0, 0

    async def start(self, settings: EnvSettings) -> EnvPool:
        pool = EnvPool(settings, model=self._model, renderer=self._renderer, family=self._family, token=self._token)
        self._stack.push_async_callback(pool.close)
        await pool.start()
        if not pool.tasks:
            raise PermanentError(f"environment {settings.id} has no tasks; check its args")
        self._pools.append(pool)
        return pool

    def used(self) -> list[UsedEnvironment]:
        """List the environments with the code that their workers loaded."""
        return [UsedEnvironment(pool.name, pool.id, pool.code) for pool in self._pools]

    def metrics(self) -> dict[str, float]:
        """Count the workers that serve now, and since the last call those that were lost, and episodes of theirs that
        went on in another."""
        lost, lost_before = sum(pool.restarts for pool in self._pools), self._lost
        resumed, resumed_before = sum(pool.resumed for pool in self._pools), self._resumed
        self._lost, self._resumed = lost, resumed
        return {
            "workers/serving": float(sum(pool.size for pool in self._pools)),
            "workers/lost": float(lost - lost_before),
            "workers/resumed_episodes": float(resumed - resumed_before),
        }

    async def sources(self, settings: OrchestratorSettings, seed: int, context: Context) -> list[Source]:
        """Start the training environments."""

        async def start(env: EnvSettings) -> Source:
            algorithm = make_algorithm(env.algorithm or settings.algorithm, context, settings.kl)
            check_group_size(algorithm, env.group_size or settings.group_size)
            pool = await self.start(env)
            return make_source(env, settings, seed, algorithm, pool, select_tasks(pool.tasks, env.task_set))

        return await gather_or_cancel([start(env) for env in settings.envs])

    async def eval_envs(self, settings: Sequence[EvalEnvSettings], default: SamplingSettings) -> list[EvalEnv]:
        """Start the environments to evaluate on."""

        async def start(env: EvalEnvSettings) -> EvalEnv:
            pool = await self.start(env)
            return make_eval_env(env, default, pool, select_tasks(pool.tasks, env.task_set)[: env.tasks])

        return await gather_or_cancel([start(env) for env in settings])


def check_group_size(algorithm: Algorithm, group_size: int) -> None:
    if algorithm.relative and group_size == 1:
        raise UsageError(
            f"{type(algorithm).__name__} compares the rollouts of a group, so orchestrator.group_size must be "
            "at least 2 (got 1); an algorithm that compares nothing has `relative = False`"
        )


def make_source(
    env: EnvSettings,
    settings: OrchestratorSettings,
    seed: int,
    algorithm: Algorithm,
    pool: EpisodePool,
    tasks: Sequence[Task],
) -> Source:
    """Make a training environment of its settings, whose episodes `pool` runs."""
    return Source(
        name=env.name or env.id,
        pool=pool,
        tasks=tasks,
        curriculum=make_curriculum(env.curriculum, tasks, seed),
        algorithm=algorithm,
        group_size=env.group_size or settings.group_size,
        sampling=sampling_params(env.sampling or settings.sampling),
        timeout=env.timeout,
        capacity=env.workers.max * env.workers.episodes,
        ratio=env.ratio,
        rate=RateLimit(env.rate_limit),
    )


def make_eval_env(env: EvalEnvSettings, default: SamplingSettings, pool: EpisodePool, tasks: Sequence[Task]) -> EvalEnv:
    """Make an environment to evaluate on of its settings."""
    return EvalEnv(
        name=env.name or env.id,
        pool=pool,
        tasks=tasks,
        samples=env.samples,
        sampling=sampling_params(env.sampling or default),
        timeout=env.timeout,
        capacity=env.workers.max * env.workers.episodes,
    )


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at the same time; when one fails, the others are cancelled and waited for before it raises."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def sampling_params(settings: SamplingSettings) -> SamplingParams:
    return SamplingParams(**settings.model_dump())
