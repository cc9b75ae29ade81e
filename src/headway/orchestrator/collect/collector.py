"""The collector turns settled groups into trainable ones: cut samples, let the algorithm score them, filter."""

import asyncio
import logging
from collections.abc import Sequence

import msgspec
import numpy as np

from headway.algorithms.base import Group, Rollout, mean
from headway.base.errors import HeadwayError
from headway.config.orchestrator import FilterSettings
from headway.core.episodes import MAX_REWARD, Episode
from headway.core.journal import Failed, Judged, Scored
from headway.core.samples import Sample
from headway.envs.samples import episode_samples
from headway.orchestrator.background import Background, LoopBackground
from headway.orchestrator.collect.filters import Gate, Verdict, judge, load_filters
from headway.orchestrator.groups.open_group import OpenGroup
from headway.orchestrator.groups.ready import ReadyGroup, ReadyQueue
from headway.orchestrator.groups.sources import Source
from headway.orchestrator.health import Health
from headway.orchestrator.journaling import Journal
from headway.orchestrator.tally import StepTally

SHARE_WEIGHT = 0.05
LEAST_SHARE = 0.05
LARGEST_STATE = 4096
"""Bytes of an algorithm's state that are noted with every group."""

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
        background: Background | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.tally = tally
        self.scoring: dict[str, OpenGroup] = {}
        self.useful_share = 1.0
        """Share of recent episodes that could be trained: how much to expect of those on their way."""
        self._ready, self._filters, self._gates, self._seq_len = ready, filters, gates, seq_len
        self._own_filters = load_filters(filters.custom)
        self._health, self._changed = health, changed
        self._background, self._journal = background or LoopBackground(), journal or Journal()

    @property
    def outstanding(self) -> int:
        """Episodes that are being scored."""
        return sum(len(group.finished) for group in self.scoring.values())

    def add(self, group: OpenGroup, source: Source) -> None:
        """Score a settled group in a task of its own."""
        if not group.usable(source.at_least):
            # Episodes of cancelled groups are counted where they are cancelled.
            if not group.cancelled:
                self._journal.decided(Failed(self._journal.short(group.id)))
                self.tally.dropped["failed"] += group.size
                self._learn_share(0, group.size)
            self._changed.set()
            return
        self.scoring[group.id] = group
        self._background.start(group.id, lambda: self._score(group, source), self._done)

    async def close(self) -> None:
        await self._background.close()

    async def _score(self, settled: OpenGroup, source: Source) -> None:
        try:
            rollouts = self._valid_rollouts(settled.finished)
            group, failure = Group(settled.id, settled.env, settled.task, rollouts), None
            if len(rollouts) >= source.at_least:
                try:
                    await source.algorithm.query_references(group)
                except HeadwayError as error:
                    failure = str(error)
            self.conclude(settled, source, group, failure)
        finally:
            self.scoring.pop(settled.id, None)
            self._changed.set()

    def conclude(self, settled: OpenGroup, source: Source, group: Group, failure: str | None = None) -> None:
        """Score and filter a group whose references were asked; `failure` is what they said instead of an answer."""
        self._journal.input(Scored(0, self._journal.short(settled.id), failure is not None))
        verdict = self._judge(source, group, failure)
        self.apply(self._outcome(source, group, verdict), settled, source, group, verdict.samples)

    def _judge(self, source: Source, group: Group, failure: str | None) -> Verdict:
        if len(group.rollouts) < source.at_least:
            return Verdict(cause="failed")
        self.tally.saw_group(group)
        if failure is not None:
            logger.warning("a group of %s is dropped, as its reference model failed: %s", group.env, failure)
            self._health.reference_failed(failure)
            return Verdict(cause="reference")
        source.algorithm.score(group)
        verdict = judge(group, self._filters, self._seq_len, self._gates, self._own_filters)
        self.tally.samples_dropped.update(verdict.dropped)
        return verdict

    def _outcome(self, source: Source, group: Group, verdict: Verdict) -> Judged:
        state = source.algorithm.save()
        encoded = msgspec.json.encode(state) if state else b""
        return Judged(
            group=self._journal.short(group.id),
            cause=verdict.cause or "",
            rollouts=len(group.rollouts),
            episodes=verdict.episodes,
            oldest_version=min((sample.oldest_version for sample in verdict.samples), default=2**31 - 1),
            reward=mean([rollout.episode.reward for rollout in group.rollouts]) if group.rollouts else 0.0,
            dropped=verdict.dropped,
            algorithm=encoded if len(encoded) <= LARGEST_STATE else b"",
        )

    def apply(
        self, outcome: Judged, settled: OpenGroup, source: Source, group: Group, samples: Sequence[Sample]
    ) -> None:
        """Let the outcome of scoring take effect: `ready` gets the group, or it is counted as dropped."""
        self._journal.decided(outcome)
        self.scoring.pop(settled.id, None)
        if outcome.cause == "failed":
            self.tally.dropped["failed"] += settled.size
            self._learn_share(0, settled.size)
            return
        source.curriculum.report(settled.task_index, outcome.reward)
        if outcome.cause:
            self.tally.saw_dropped(outcome.cause, group)
        if outcome.cause == "reference":
            return
        self._health.saw_group(outcome.rollouts, useful=outcome.cause != "zero_advantage")
        self._learn_share(0 if outcome.cause else outcome.episodes, settled.size)
        if not outcome.cause:
            ready = ReadyGroup(group, list(samples), outcome.episodes, settled.settled_version, settled.task_index)
            ready.oldest_version = outcome.oldest_version
            self._ready.add(ready)

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
