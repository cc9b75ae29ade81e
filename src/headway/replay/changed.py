"""Training of recorded rollouts with other settings, as a new run beside the one that sampled them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from headway.algorithms.base import Algorithm, Group, Rollout
from headway.algorithms.registry import make_algorithm
from headway.base.errors import HeadwayError, UsageError
from headway.config.loader import load_settings
from headway.config.orchestrator import OrchestratorSettings
from headway.config.rl import RlSettings
from headway.core.batches import Batch
from headway.core.packing import make_batch
from headway.core.runs import RunPaths
from headway.core.samples import Sample
from headway.monitor.metrics import MetricsWriter
from headway.orchestrator.collect.collector import checked_samples
from headway.orchestrator.collect.filters import judge, load_filters, load_gates
from headway.orchestrator.groups.ready import ReadyGroup
from headway.orchestrator.run import batch_cost
from headway.replay.build import ReplayedBatch, check_replayable, replay_batches
from headway.replay.command import choose_steps, trainer_in
from headway.replay.lives import History

SCORING = ("algorithm", "filters", "gates")
"""Settings of the orchestrator that recorded rollouts can be scored and filtered by anew."""
CHANGEABLE = ("trainer", "run", "log", "tracking", "placement", "seed", "max_steps")

LIMITS = (
    "These rollouts were sampled by the policies of the run that is replayed, not by the one trained here: they become "
    "more off-policy with every step. Read the first steps as a comparison of settings, later ones with care. Groups "
    "that the run dropped are not recorded, so a milder filter brings none of them back."
)


def replay_changed(
    paths: RunPaths,
    history: History,
    argv: Sequence[str],
    say: Callable[[str], None],
    from_step: int | None,
    to_step: int | None,
) -> Path:
    """Train the batches after `from_step` with the settings that `argv` changes. Returns the folder of the new run."""
    from_step = history.first_step if from_step is None else from_step
    steps = choose_steps(paths, history, from_step, to_step, train=True)
    own = ["@", str(paths.config / "rl.toml"), "--run.name", "none", "--run.output_dir", str(paths.root.parent)]
    before, resolved = load_settings(RlSettings, own).settings, load_settings(RlSettings, [*own, *argv])
    settings = resolved.settings
    check_changes(before, settings)
    rescorer = Rescorer(settings) if _scoring(settings.orchestrator) != _scoring(before.orchestrator) else None
    with trainer_in(paths, settings, from_step, settings.run.output_dir) as trainer:
        say(f"a new run in {trainer.paths.root}")
        trainer.start(from_step)
        metrics = MetricsWriter(trainer.paths, "orchestrator", resume_step=from_step)
        for replayed in replay_batches(paths, history):
            step = replayed.batch.step
            if step not in steps:
                continue
            batch = rescorer.batch(replayed) if rescorer else replayed.batch
            metrics.log(step, replayed.next.values)
            trainer.train(batch, replayed.next.state)
            say(f"step {step}: {len(replayed.next.groups)} recorded groups, {batch.counts.rl:,} tokens trained")
        metrics.close()
        trainer.stop()
        say(LIMITS)
        return trainer.paths.root


def check_changes(before: RlSettings, after: RlSettings) -> None:
    """Raise UsageError for changed settings that recorded rollouts cannot follow."""
    changed = [name for name in RlSettings.model_fields if getattr(after, name) != getattr(before, name)]
    refused = [name for name in changed if name not in (*CHANGEABLE, "orchestrator")]
    mine, theirs = after.orchestrator, before.orchestrator
    changed = [name for name in OrchestratorSettings.model_fields if getattr(mine, name) != getattr(theirs, name)]
    refused += [f"orchestrator.{name}" for name in changed if name not in (*SCORING, "envs")]
    if not _same_envs(theirs, mine):
        refused.append("orchestrator.envs")
    if refused:
        raise UsageError(
            f"{', '.join(refused)}: the rollouts are recorded already, so a replay cannot change this; it can change "
            f"trainer.*, and of the orchestrator {', '.join(SCORING)} and envs.N.algorithm"
        )


def _same_envs(before: OrchestratorSettings, after: OrchestratorSettings) -> bool:
    """Tell whether environments differ by their algorithms alone."""
    plain = [[env.model_copy(update={"algorithm": None}) for env in settings.envs] for settings in (before, after)]
    return plain[0] == plain[1]


def _scoring(settings: OrchestratorSettings) -> list[object]:
    return [*(getattr(settings, name) for name in SCORING), *(env.algorithm for env in settings.envs)]


class Rescorer:
    """Scores and filters the groups of recorded batches by other settings. A batch keeps its groups, or fewer."""

    def __init__(self, settings: RlSettings) -> None:
        options = settings.orchestrator
        self._settings, self._cost = settings, batch_cost(settings.model.path)
        self._gates, self._filters = load_gates(options.gates), load_filters(options.filters.custom)
        self._algorithms: dict[str, Algorithm] = {}
        for env in options.envs:
            algorithm = make_algorithm(env.algorithm or options.algorithm)
            check_replayable(algorithm, env.name or env.id)
            self._algorithms[env.name or env.id] = algorithm

    def batch(self, replayed: ReplayedBatch) -> Batch:
        """Make the batch of a step anew. Raises HeadwayError where filters leave nothing of it."""
        step, kept = replayed.batch.step, [self._judged(ready) for ready in replayed.next.groups]
        for name, algorithm in self._algorithms.items():
            algorithm.finish_batch([group for group, samples in kept if samples and group.env == name])
        samples = [sample for _, chosen in kept for sample in chosen]
        if not samples:
            raise HeadwayError(f"the filters leave nothing of batch {step}; make them milder, or stop before it")
        settings = self._settings
        ranks = settings.placement.batch_parts
        batch = make_batch(step, samples, seq_len=settings.seq_len, ranks=ranks, cost=self._cost)
        batch.metrics = replayed.next.values
        return batch

    def _judged(self, ready: ReadyGroup) -> tuple[Group, list[Sample]]:
        old = ready.group
        rollouts = [Rollout(rollout.episode, checked_samples(rollout.episode)) for rollout in old.rollouts]
        images = {sample.key: sample.images for rollout in old.rollouts for sample in rollout.samples}
        for sample in (sample for rollout in rollouts for sample in rollout.samples):
            sample.images = images.get(sample.key)
        group = Group(old.id, old.env, old.task, rollouts)
        self._algorithms[group.env].score(group)
        options = self._settings.orchestrator
        verdict = judge(group, options.filters, self._settings.seq_len, self._gates, self._filters)
        return group, [] if verdict.cause else verdict.samples
