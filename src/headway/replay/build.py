"""Construction of what replays a run: an orchestrator with the settings that the journal has, and nothing around it."""

from collections.abc import Iterator
from dataclasses import dataclass

from headway.algorithms.base import Algorithm, Context
from headway.algorithms.registry import make_algorithm
from headway.base.errors import UsageError
from headway.config.orchestrator import CustomSampler, EnvSettings, OrchestrateSettings
from headway.core.batches import Batch
from headway.core.episodes import Task
from headway.core.packing import Cost, make_batch
from headway.core.runs import RunPaths
from headway.orchestrator.environments import make_eval_env, make_source
from headway.orchestrator.groups.sources import Source
from headway.orchestrator.images import run_images
from headway.orchestrator.loop import NextBatch, Orchestrator
from headway.orchestrator.run import batch_cost, resolve_folder
from headway.orchestrator.wiring import make_orchestrator
from headway.replay.decisions import LifeReplay
from headway.replay.lives import History, Life
from headway.replay.recorded import RecordedEpisodes
from headway.replay.world import NoMetrics, NoRunner, NothingRuns, RecordedDraws, ReplayFleet, ReplayJournal, StateOf


@dataclass(frozen=True, slots=True)
class ReplayedBatch:
    """A batch of the replay, packed as the run did. `identical`: its bits are the run's; None where that is unknown,
    as the run was killed while it sent the batch."""

    next: NextBatch
    batch: Batch
    identical: bool | None


def replay_batches(paths: RunPaths, history: History) -> Iterator[ReplayedBatch]:
    """Replay the orchestrator's decisions from the start, and yield its batches in order."""
    costs: dict[str, Cost] = {}
    for life in history.lives:
        if not life.kept:
            continue  # it sent nothing that was not collected again
        settings = recorded_settings(life)
        if not settings.orchestrator.record_rollouts:
            raise UsageError("the run kept no rollouts (orchestrator.record_rollouts = false), so there are no batches")
        cost = costs.setdefault(settings.model.path, batch_cost(settings.model.path))
        episodes = RecordedEpisodes(paths, life)
        images = run_images(paths, resolve_folder(settings.model.path))
        for next_batch in replay_life(life, settings, episodes).batches():
            if images is not None:
                images.add_to_rollouts(rollout for ready in next_batch.groups for rollout in ready.group.rollouts)
            samples = [sample for group in next_batch.groups for sample in group.samples]
            ranks = settings.placement.batch_parts
            batch = make_batch(next_batch.step, samples, seq_len=settings.seq_len, ranks=ranks, cost=cost)
            batch.metrics = next_batch.values
            recorded = history.digests.get(next_batch.step)
            yield ReplayedBatch(next_batch, batch, None if recorded is None else batch.digest() == recorded)
            episodes.forget(next_batch.step)


def recorded_settings(life: Life) -> OrchestrateSettings:
    """Return the settings that a process of the run had."""
    return OrchestrateSettings.model_validate_json(life.began.settings)


def replay_life(life: Life, settings: OrchestrateSettings, episodes: RecordedEpisodes) -> LifeReplay:
    journal, fleet = ReplayJournal(life.prefix), ReplayFleet()
    return LifeReplay(life, _orchestrator(life, settings, fleet, journal), fleet, journal, episodes.of_group)


def _orchestrator(
    life: Life, settings: OrchestrateSettings, fleet: ReplayFleet, journal: ReplayJournal
) -> Orchestrator:
    options, began = settings.orchestrator, life.began
    return make_orchestrator(
        options,
        max_steps=settings.max_steps,
        seq_len=settings.seq_len,
        sources=[_source(env, settings, _tasks(began.tasks[env.name or env.id]), journal) for env in options.envs],
        evals=[
            make_eval_env(env, options.sampling, NoRunner(), _tasks(began.eval_tasks[env.name or env.id]))
            for env in options.eval.envs
        ],
        fleet=fleet,
        outbox=StateOf(began),
        recorder=NoMetrics(),
        on_evaluation=lambda round_: None,
        announced=lambda: None,
        new_id=journal.new_id,
        journal=journal,
        make_background=NothingRuns,
    )


def _tasks(count: int) -> list[Task]:
    """Tasks by number: what they are about is in the recorded episodes."""
    return [Task(str(number)) for number in range(count)]


def check_replayable(algorithm: Algorithm, env: str) -> None:
    """Raise UsageError for an algorithm that needs more than the recorded episodes."""
    if type(algorithm).query_references is not Algorithm.query_references:
        raise UsageError(
            f"environment {env} asks a reference model, whose answers the run does not keep: its batches cannot be "
            "made again"
        )


def _source(env: EnvSettings, settings: OrchestrateSettings, tasks: list[Task], journal: ReplayJournal) -> Source:
    options = settings.orchestrator
    algorithm = make_algorithm(env.algorithm or options.algorithm, Context(), options.kl)
    check_replayable(algorithm, env.name or env.id)
    drawn = isinstance(env.curriculum, CustomSampler)
    known = env.model_copy(update={"curriculum": EnvSettings.model_fields["curriculum"].default}) if drawn else env
    source = make_source(known, options, settings.seed, algorithm, NoRunner(), tasks)
    if drawn:
        source.curriculum = RecordedDraws(journal)
    return source
