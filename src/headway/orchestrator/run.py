"""A run's real parts, put together: worker pools, engines, transports, files."""

import asyncio
import gc
import json
import logging
import signal
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from headway.algorithms.base import Context
from headway.algorithms.registry import make_algorithm
from headway.config.orchestrator import EnvSettings, EvalEnvSettings, OrchestrateSettings, SamplingSettings
from headway.config.shared import TrackingSettings
from headway.core.errors import HeadwayError, UsageError
from headway.core.packing import Cost
from headway.core.protocol import SamplingParams
from headway.core.runs import RunPaths
from headway.envs.workers.pool import EnvPool
from headway.monitor.metrics import MetricsWriter
from headway.monitor.sinks import make_sinks
from headway.orchestrator.dispatch.curriculum import make_curriculum
from headway.orchestrator.dispatch.rate import RateLimit
from headway.orchestrator.dispatch.training import Source
from headway.orchestrator.evaluation import EvalEnv, Round, write_round
from headway.orchestrator.fleet.fleet import Fleet
from headway.orchestrator.fleet.membership import admin_token, engine_finder
from headway.orchestrator.loop import Orchestrator, first_to_end
from headway.orchestrator.outbox import BatchOutbox
from headway.orchestrator.parts import Parts
from headway.rendering.base import Renderer
from headway.transport.inference import InferenceClient
from headway.transport.rollouts import make_sender
from headway.transport.weights.announcements import latest

log = logging.getLogger("headway.orchestrator")
T = TypeVar("T")


class RunRecorder:
    """Metrics and evaluation records in the run's folder."""

    def __init__(self, paths: RunPaths, resume_step: int, tracking: TrackingSettings) -> None:
        self._paths = paths
        sinks = make_sinks(tracking, paths, "orchestrator")
        self._metrics = MetricsWriter(paths, "orchestrator", resume_step=resume_step, sinks=sinks)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._metrics.log(step, values)

    def evaluated(self, round_: Round, envs: Sequence[EvalEnv]) -> None:
        write_round(round_, envs, self._paths.evaluations)

    def close(self) -> None:
        self._metrics.close()


async def run_to_end(settings: OrchestrateSettings, paths: RunPaths) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await first_to_end(_run(settings, paths), _stopped(stop))


async def _stopped(stop: asyncio.Event) -> None:
    await stop.wait()
    log.info("stopping")


async def _run(settings: OrchestrateSettings, paths: RunPaths) -> None:
    options = settings.orchestrator
    if not options.envs:
        raise UsageError("no environment to train on; add an [[orchestrator.envs]] table with an id")
    model = resolve_folder(settings.model.path)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        token = admin_token(paths)
        fleet = Fleet(
            engine_finder(options.engines, paths), lambda url: InferenceClient(url, token=token, session=session)
        )
        context = Context(lambda: fleet.choose(""), lambda: _renderer(model, settings.model.renderer))
        pools = Pools(stack, model, settings.model.renderer)
        sources = await together([_source(env, settings, pools, context) for env in options.envs])
        evals = await together([eval_env(env, options.sampling, pools) for env in options.eval.envs])
        refuse_twins([source.name for source in sources], "orchestrator.envs")
        refuse_twins([env.name for env in evals], "orchestrator.eval.envs")
        for source in sources:
            stack.push_async_callback(source.algorithm.close)
        sender = make_sender(settings.rollouts, paths)
        stack.callback(sender.close)
        outbox = BatchOutbox(
            sender,
            paths,
            seq_len=settings.seq_len,
            ranks=settings.placement.data_ranks,
            cost=Cost.of_width(model_width(model)),
            record=options.record_rollouts,
        )
        recorder = RunRecorder(paths, outbox.last_step(), settings.tracking)
        stack.callback(recorder.close)
        parts = Parts(sources, evals, fleet, outbox, recorder, lambda: latest(paths), pools.values)
        spare_the_collector()
        await Orchestrator(parts, options, max_steps=settings.max_steps, seq_len=settings.seq_len).run()


def spare_the_collector() -> None:
    """Keep the garbage collector from walking what lives as long as the process: its pauses stop the event loop."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


class Pools:
    """Worker pools, closed with the stack."""

    def __init__(self, stack: AsyncExitStack, model: Path, renderer: str) -> None:
        self._stack, self._model, self._renderer = stack, model, renderer
        self._pools: list[EnvPool] = []
        self._lost = 0

    async def start(self, settings: EnvSettings) -> EnvPool:
        pool = EnvPool(settings, model=self._model, renderer=self._renderer)
        self._stack.push_async_callback(pool.close)
        await pool.start()
        if not pool.tasks:
            raise HeadwayError(f"environment {settings.id} has no tasks; check its args")
        self._pools.append(pool)
        return pool

    def values(self) -> dict[str, float]:
        """Workers that serve now, and those that were lost since the last time."""
        lost, before = sum(pool.restarts for pool in self._pools), self._lost
        self._lost = lost
        return {"workers/serving": float(sum(pool.size for pool in self._pools)), "workers/lost": float(lost - before)}


async def together(parts: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All of them at the same time; when one fails the others are called off, and waited for, before it raises."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _source(env: EnvSettings, settings: OrchestrateSettings, pools: Pools, context: Context) -> Source:
    options = settings.orchestrator
    pool = await pools.start(env)
    return Source(
        name=env.name or env.id,
        runner=pool,
        tasks=pool.tasks,
        curriculum=make_curriculum(env.curriculum, len(pool.tasks), settings.seed),
        algorithm=make_algorithm(env.algorithm or options.algorithm, context),
        group_size=env.group_size or options.group_size,
        sampling=sampling_params(env.sampling or options.sampling),
        timeout=env.timeout,
        capacity=env.workers.max * env.workers.episodes,
        ratio=env.ratio,
        rate=RateLimit(env.rate_limit),
    )


async def eval_env(env: EvalEnvSettings, default: SamplingSettings, pools: Pools) -> EvalEnv:
    pool = await pools.start(env)
    return EvalEnv(
        name=env.name or env.id,
        runner=pool,
        tasks=pool.tasks[: env.tasks],
        samples=env.samples,
        sampling=sampling_params(env.sampling or default),
        timeout=env.timeout,
        capacity=env.workers.max * env.workers.episodes,
    )


def sampling_params(settings: SamplingSettings) -> SamplingParams:
    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_tokens=settings.max_tokens,
    )


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)
    )


def refuse_twins(names: Sequence[str], where: str) -> None:
    twins = {name for name in names if names.count(name) > 1}
    if twins:
        raise UsageError(f"{where}: {', '.join(sorted(twins))} occurs more than once; give each its own `name`")


def resolve_folder(path: str) -> Path:
    """The model's folder. Only built-in models need the model code, which is heavy to import."""
    if Path(path).is_dir():
        return Path(path)
    from headway.models.tiny import resolve_model

    return resolve_model(path)


def model_width(folder: Path) -> int:
    """The hidden size, for the cost of attention; a common one where the config doesn't say."""
    try:
        width = json.loads((folder / "config.json").read_text())["hidden_size"]
    except (OSError, ValueError, KeyError):
        return 1024
    return int(width)


@cache
def _renderer(model: Path, name: str) -> Renderer:
    from headway.rendering.load import load_renderer

    return load_renderer(model, name)
