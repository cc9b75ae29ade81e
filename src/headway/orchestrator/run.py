"""Construction of a run's orchestrator: worker pools, engines, transports and files, wired by name."""

import asyncio
import gc
import json
import logging
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path

import aiohttp

from headway.algorithms.base import Context
from headway.base.errors import UsageError
from headway.config.orchestrator import OrchestrateSettings
from headway.config.shared import TrackingSettings
from headway.core.control import RunControl
from headway.core.journal import JournalFile
from headway.core.packing import Cost
from headway.core.records import RolloutRecord, write_untrained
from headway.core.runs import RunPaths
from headway.monitor.metrics import MetricsWriter
from headway.monitor.sinks import make_sinks
from headway.orchestrator.dispatch.dispatcher import random_id
from headway.orchestrator.environment_record import record_environments
from headway.orchestrator.environments import WorkerPools
from headway.orchestrator.evaluation import Round, write_round
from headway.orchestrator.fleet.fleet import Fleet
from headway.orchestrator.fleet.membership import engine_finder
from headway.orchestrator.images import run_images
from headway.orchestrator.journaling import Journal
from headway.orchestrator.loop import first_to_end
from headway.orchestrator.outbox import BatchOutbox
from headway.orchestrator.swarm_intake import SwarmIntake
from headway.orchestrator.wiring import make_orchestrator
from headway.rendering.base import Renderer
from headway.swarm.work.spool import Spool
from headway.transport.inference import InferenceClient
from headway.transport.rollouts import make_sender
from headway.transport.tenants.tenancy import read_tenancy
from headway.transport.tls import client_context

logger = logging.getLogger(__name__)

STOP_POLL_SECONDS = 0.5


class RunRecorder:
    """Metrics and evaluation records in the run's folder."""

    def __init__(self, paths: RunPaths, resume_step: int, tracking: TrackingSettings) -> None:
        self._paths = paths
        sinks = make_sinks(tracking, paths, "orchestrator")
        self._metrics = MetricsWriter(paths, "orchestrator", resume_step=resume_step, sinks=sinks)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._metrics.log(step, values)

    def log_untrained(self, step: int, records: Sequence[RolloutRecord]) -> None:
        write_untrained(self._paths, step, records)

    def log_evaluation(self, round_: Round) -> None:
        summary = round_.summary()
        write_round(round_, self._paths.evaluations)
        self.log(round_.step, summary)
        averages = ", ".join(f"{name.removeprefix('eval/')} {v:.3f}" for name, v in summary.items() if "avg" in name)
        logger.info("evaluation after step %d: %s", round_.step, averages)

    def close(self) -> None:
        self._metrics.close()


def orchestrate(settings: OrchestrateSettings, paths: RunPaths, control: RunControl) -> bool:
    """Run the orchestrator of a run until its last step (True), or until SIGTERM or SIGINT. Raises HeadwayError."""
    finished = asyncio.run(_run_until_stopped(settings, paths, control))
    if finished:
        control.finish()
    return finished


async def _run_until_stopped(settings: OrchestrateSettings, paths: RunPaths, control: RunControl) -> bool:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await first_to_end(_run(settings, paths, control), _stopped(stop), _stop_when_asked(control, stop))
    return not stop.is_set()


async def _stopped(stop: asyncio.Event) -> None:
    await stop.wait()
    logger.info("stopping")


async def _stop_when_asked(control: RunControl, stop: asyncio.Event) -> None:
    while True:
        if control.stop_asked():
            stop.set()
            logger.info("stopping, as the run is asked to")
            return
        await asyncio.sleep(STOP_POLL_SECONDS)


async def _run(settings: OrchestrateSettings, paths: RunPaths, control: RunControl) -> None:
    options = settings.orchestrator
    if not options.envs:
        raise UsageError("no environment to train on; add an [[orchestrator.envs]] table with an id")
    model, renderer, family = resolve_folder(settings.model.path), settings.model.renderer, settings.model.family
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        fleet = Fleet(
            engine_finder(options.engines, control),
            lambda url: InferenceClient(url, token=control.token, session=session),
        )
        context = Context(lambda: fleet.choose(""), lambda: _renderer(model, renderer, family), token=control.token)
        # Environments are the user's code: only a tenant's token, which opens nothing but its own adapter, goes there.
        shown = None if read_tenancy(paths) is None else control.token
        pools = WorkerPools(stack, model, renderer, family, shown)
        sources = await pools.sources(options, settings.seed, context)
        for source in sources:
            stack.push_async_callback(source.algorithm.close)
        evals = await pools.eval_envs(options.eval.envs, options.sampling)
        record_environments(paths, pools.used())
        outbox = _open_outbox(settings, paths, control, model, stack)
        journal = open_journal(settings, paths)
        stack.callback(journal.close)
        recorder = RunRecorder(paths, outbox.last_step(), settings.tracking)
        stack.callback(recorder.close)
        orchestrator = make_orchestrator(
            options,
            max_steps=settings.max_steps,
            seq_len=settings.seq_len,
            sources=sources,
            evals=evals,
            fleet=fleet,
            outbox=outbox,
            recorder=recorder,
            on_evaluation=recorder.log_evaluation,
            announced=control.latest,
            worker_metrics=pools.metrics,
            new_id=journal.new_id,
            journal=journal,
        )
        freeze_gc()
        if options.swarm:
            await first_to_end(orchestrator.run(), SwarmIntake(orchestrator, Spool(paths)).watch())
        else:
            await orchestrator.run()


def _open_outbox(
    settings: OrchestrateSettings, paths: RunPaths, control: RunControl, model: Path, stack: AsyncExitStack
) -> BatchOutbox:
    """Open the way of batches to the trainer; the stack closes it."""
    sender = make_sender(settings.rollouts, paths, control)
    stack.callback(sender.close)
    return BatchOutbox(
        sender,
        paths,
        seq_len=settings.seq_len,
        ranks=settings.placement.batch_parts,
        cost=batch_cost(str(model)),
        record=settings.orchestrator.record_rollouts,
        checkpoints=control.checkpoints,
        images=run_images(paths, model),
    )


def open_journal(settings: OrchestrateSettings, paths: RunPaths) -> Journal:
    """Open the run's journal, or one that keeps nothing where the settings say so."""
    megabytes = settings.orchestrator.journal_mb
    file = JournalFile(paths.journal, megabytes << 20) if megabytes else None
    # Ids are unique over processes, and their count within one repeats in a replay.
    return Journal(file, prefix=random_id()[:16], settings=settings.model_dump_json().encode())


def freeze_gc() -> None:
    """Keep the garbage collector from walking what lives as long as the process: its pauses stop the event loop."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=client_context()),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
    )


def batch_cost(model: str) -> Cost:
    """Return what a sequence costs the model in this folder, or of this name."""
    return Cost.of_width(model_width(resolve_folder(model)))


def resolve_folder(path: str) -> Path:
    """Return the model's folder, of which only config and tokenizer are needed here.

    Only built-in models and those of the hub need the model code, which is heavy to import.
    """
    if Path(path).is_dir():
        return Path(path)
    from headway.models.tiny import resolve_model

    return resolve_model(path, weights=False)


def model_width(folder: Path) -> int:
    """Read the hidden size, for the cost of attention; a common one where the config doesn't say."""
    try:
        width = json.loads((folder / "config.json").read_text())["hidden_size"]
    except (OSError, ValueError, KeyError):
        return 1024
    return int(width)


@cache
def _renderer(model: Path, name: str, family: str | None) -> Renderer:
    from headway.rendering.load import load_renderer

    return load_renderer(model, name, family)
