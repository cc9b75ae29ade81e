"""An evaluation by itself, against endpoints that nobody steers: no trainer, no updates, a fixed budget."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Literal

from headway.config.orchestrator import EvalEnvSettings, SamplingSettings
from headway.core.errors import HeadwayError
from headway.orchestrator.dispatch.dispatcher import Dispatcher
from headway.orchestrator.evaluation import EvalEnv, EvaluationWork, Round
from headway.orchestrator.run import Pools, eval_env, open_session, refuse_twins, together
from headway.transport.inference import InferenceClient


class Endpoints:
    """A fleet of given base URLs: the least loaded first."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._flights: Counter[str] = Counter()

    def choose(self, group_id: str) -> list[str]:
        return sorted(self._urls, key=lambda url: self._flights[url])

    def started(self, engine: str) -> None:
        self._flights[engine] += 1

    def ended(self, engine: str, *, engine_failed: bool) -> None:
        self._flights[engine] -= 1

    async def check(self) -> None:
        """Raises HeadwayError when an endpoint doesn't answer."""
        async with open_session() as session:
            for url in self._urls:
                if not await InferenceClient(url, session=session).health():
                    raise HeadwayError(f"nothing serves at {url}; start a server with `headway serve MODEL`")


async def evaluate(
    settings: Sequence[EvalEnvSettings],
    urls: Sequence[str],
    *,
    model: Path,
    renderer: str,
    policy: str,
    api: Literal["tokens", "chat"],
    concurrency: int,
    progress: Callable[[int], AbstractContextManager[Callable[[float], None]]],
) -> tuple[Round, list[EvalEnv]]:
    """One round on all environments. `progress(episodes)` opens a bar, which is advanced as they finish."""
    endpoints = Endpoints(urls)
    if api == "tokens":
        await endpoints.check()
    async with AsyncExitStack() as stack:
        pools = Pools(stack, model, renderer)
        envs = await together([eval_env(env, SamplingSettings(), pools) for env in settings])
        refuse_twins([env.name for env in envs], "--env")
        finished: asyncio.Future[Round] = asyncio.get_running_loop().create_future()
        advance = stack.enter_context(progress(sum(len(env.tasks) * env.samples for env in envs)))
        work = EvaluationWork(
            envs,
            endpoints,
            version=lambda: 0,
            new_id=lambda: uuid.uuid4().hex,
            finished=finished.set_result,
            advanced=lambda episode: advance(1),
            policy=policy,
            api=api,
        )
        dispatcher = Dispatcher(endpoints, [work], concurrency)
        stack.push_async_callback(dispatcher.close)
        work.begin(0)
        dispatcher.pump()
        return await finished, envs
