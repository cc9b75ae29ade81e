"""The collector turns settled groups into trainable ones: cut samples, let the algorithm score them, filter."""

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from headway.algorithms.base import Group, Rollout, mean
from headway.config.orchestrator import FilterSettings
from headway.core.episodes import MAX_REWARD, Episode
from headway.core.errors import HeadwayError
from headway.core.samples import Sample
from headway.envs.samples import episode_samples
from headway.orchestrator.collect.filters import Gate, judge, load_filters
from headway.orchestrator.collect.ready import ReadyGroup, ReadyQueue
from headway.orchestrator.dispatch.groups import OpenGroup
from headway.orchestrator.dispatch.sources import Source
from headway.orchestrator.health import Health
from headway.orchestrator.tally import StepTally

SHARE_WEIGHT = 0.05
LEAST_SHARE = 0.05

logger = logging.getLogger(__name__)


class Collector:
    """Takes settled groups; what is worth training goes to `ready`. Everything else is counted by cause."""

    def __init__(
        self,
        ready: ReadyQueue,
        *,
        filters: FilterSettings,
        gates: Sequence[Gate],
        seq_len: int,
        health: Health,
        tally: StepTally,
        changed: asyncio.Event,
    ) -> None:
        self.tally = tally
        self.scoring: dict[str, OpenGroup] = {}
        self.useful_share = 1.0
        """Share of recent episodes that could be trained: how much to expect of those on their way."""
        self._ready, self._filters, self._gates, self._seq_len = ready, filters, gates, seq_len
        self._own_filters = load_filters(filters.custom)
        self._health, self._changed = health, changed
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def outstanding(self) -> int:
        """Episodes that are being scored."""
        return sum(len(group.finished) for group in self.scoring.values())

    def add(self, group: OpenGroup, source: Source, version: int) -> None:
        """Score a settled group in a task of its own. `version` is the trainer's newest."""
        if not group.usable(source.at_least):
            # Episodes of cancelled groups are counted where they are cancelled.
            if not group.cancelled:
                self.tally.dropped["failed"] += group.size
                self._learn_share(0, group.size)
            self._changed.set()
            return
        self.scoring[group.id] = group
        task = asyncio.get_running_loop().create_task(self._score(group, source, max(version, 0)))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _score(self, settled: OpenGroup, source: Source, version: int) -> None:
        try:
            await self._judge(settled, source, version)
        finally:
            del self.scoring[settled.id]
            self._changed.set()

    async def _judge(self, settled: OpenGroup, source: Source, version: int) -> None:
        rollouts = self._valid_rollouts(settled.finished)
        if len(rollouts) < source.at_least:
            self.tally.dropped["failed"] += settled.size
            self._learn_share(0, settled.size)
            return
        group = Group(settled.id, settled.env, settled.task, rollouts)
        self.tally.saw_group(group)
        source.curriculum.report(settled.task_index, mean([rollout.episode.reward for rollout in rollouts]))
        try:
            await source.algorithm.query_references(group)
        except HeadwayError as error:
            logger.warning("a group of %s is dropped, as its reference model failed: %s", settled.env, error)
            self.tally.saw_dropped("reference", group)
            self._health.reference_failed(str(error))
            return
        source.algorithm.score(group)
        verdict = judge(group, self._filters, self._seq_len, self._gates, self._own_filters)
        self.tally.samples_dropped.update(verdict.dropped)
        self._health.saw_group(len(rollouts), useful=verdict.cause != "zero_advantage")
        self._learn_share(0 if verdict.cause else verdict.episodes, settled.size)
        if verdict.cause is not None:
            self.tally.saw_dropped(verdict.cause, group)
            return
        self._ready.add(ReadyGroup(group, verdict.samples, verdict.episodes, version, settled.task_index))

    def _valid_rollouts(self, episodes: Sequence[Episode]) -> list[Rollout]:
        """Cut the valid episodes into samples. A single NaN in logprobs or rewards would spoil the whole model."""
        rollouts = []
        for episode in episodes:
            try:
                rollouts.append(Rollout(episode, checked_samples(episode)))
            except ValueError as error:
                logger.warning("an episode of %s is invalid and dropped: %s", episode.env, error)
                self.tally.dropped["invalid"] += 1
                self.tally.untrained.add("invalid", episode.env, [episode])
        return rollouts

    def _learn_share(self, useful: int, episodes: int) -> None:
        moved = self.useful_share + SHARE_WEIGHT * (useful / episodes - self.useful_share)
        self.useful_share = max(LEAST_SHARE, moved)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug in an algorithm or a gate: the run stops with it.
            self._health.failure = self._health.failure or error
            self._changed.set()


def checked_samples(episode: Episode) -> list[Sample]:
    """Cut an episode into samples. Raises ValueError where streams don't match or hold numbers that aren't finite."""
    samples = episode_samples(episode)
    for sample in samples:
        reward = episode.traces[sample.trace].reward
        if not abs(reward) <= MAX_REWARD:
            raise ValueError(f"its reward is {reward}; rewards are numbers of at most {MAX_REWARD:g}")
        if not np.isfinite(sample.logprobs).all():
            raise ValueError("an engine sent logprobs that are not finite")
    return samples
