"""An evaluation by itself, against given endpoints: no trainer, no updates, a fixed number of episodes in flight."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Literal

from headway.base.errors import HeadwayError, UsageError
from headway.config.orchestrator import EvalEnvSettings, SamplingSettings
from headway.orchestrator.dispatch.dispatcher import Dispatcher
from headway.orchestrator.environments import WorkerPools
from headway.orchestrator.evaluation import EvaluationWork, Round
from headway.orchestrator.run import open_session
from headway.transport.inference import InferenceClient


class Endpoints:
    """A fleet of given base URLs: the least loaded first. Its version is not known, and counts as 0."""

    version = 0

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._in_flight: Counter[str] = Counter()

    def choose(self, group_id: str) -> list[str]:
        return sorted(self._urls, key=lambda url: self._in_flight[url])

    def started(self, engine: str) -> None:
        self._in_flight[engine] += 1

    def ended(self, engine: str, *, engine_failed: bool) -> None:
        self._in_flight[engine] -= 1

    async def check(self) -> None:
        """Raise HeadwayError when an endpoint doesn't answer."""
        async with open_session() as session:
            for url in self._urls:
                if not await InferenceClient(url, session=session).health():
                    raise HeadwayError(f"no inference server answers at {url}; start one with `headway serve MODEL`")


async def evaluate(
    settings: Sequence[EvalEnvSettings],
    urls: Sequence[str],
    *,
    model: Path,
    renderer: str,
    family: str | None,
    policy: str,
    api: Literal["tokens", "chat"],
    concurrency: int,
    token: str | None = None,
    progress: Callable[[int], AbstractContextManager[Callable[[float], None]]],
) -> Round:
    """Run one round on all environments. `progress(episodes)` opens a bar, which is advanced as they finish.

    Servers that answer in tokens are shown `token`."""
    check_unique_names([env.name or env.id for env in settings])
    endpoints = Endpoints(urls)
    if api == "tokens":
        await endpoints.check()
    async with AsyncExitStack() as stack:
        envs = await WorkerPools(stack, model, renderer, family, token).eval_envs(settings, SamplingSettings())
        finished: asyncio.Future[Round] = asyncio.get_running_loop().create_future()
        advance = stack.enter_context(progress(sum(len(env.tasks) * env.samples for env in envs)))
        work = EvaluationWork(
            envs,
            endpoints,
            on_round=finished.set_result,
            on_episode=lambda episode: advance(1),
            policy=policy,
            api=api,
        )
        dispatcher = Dispatcher(endpoints, [work], concurrency)
        stack.push_async_callback(dispatcher.close)
        work.begin(0)
        dispatcher.pump()
        return await finished


def check_unique_names(names: Sequence[str]) -> None:
    """Raise UsageError where two environments have one name. In a run's settings, validation does the same."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"--env: {', '.join(twice)} occurs more than once; give each its own `name`")
