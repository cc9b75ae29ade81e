"""Training episodes: groups opened by ratio and curriculum, followed until settled, cancelled when too old."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

from headway.core.episodes import Episode, EpisodeRequest
from headway.core.journal import Cancelled, ClosedEarly, Opened
from headway.orchestrator.collect.collector import Collector
from headway.orchestrator.dispatch.admission import Admission
from headway.orchestrator.dispatch.dispatcher import EngineRouter, Launch, random_id
from headway.orchestrator.groups.loss_budget import LossBudget
from headway.orchestrator.groups.open_group import OpenGroup
from headway.orchestrator.groups.sources import Mix, Source
from headway.orchestrator.groups.staleness import last_chance, too_old
from headway.orchestrator.health import Health
from headway.orchestrator.journaling import Journal
from headway.orchestrator.tally import StepTally

LEAST_SHARE = 0.5
"""Share of a group that must have finished before it may be closed without the rest."""


class TrainingWork:
    """Offers the dispatcher the episodes of open groups, opens groups as `admission` allows, and hands settled ones to
    the collector."""

    def __init__(
        self,
        sources: Sequence[Source],
        router: EngineRouter,
        *,
        admission: Admission,
        budget: LossBudget,
        collector: Collector,
        health: Health,
        tally: StepTally,
        changed: asyncio.Event,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = random_id,
        journal: Journal | None = None,
    ) -> None:
        self.sources = {source.name: source for source in sources}
        self.mix = Mix({source.name: source.ratio for source in sources})
        self.open: dict[str, OpenGroup] = {}
        self.outstanding = 0
        """Episodes of open groups, started or not."""
        self._in_flight: Counter[str] = Counter()
        self._waiting: dict[str, OpenGroup] = {}
        self._retry_after: float | None = None
        self._router, self._admission, self.budget, self._collector = router, admission, budget, collector
        self._waits_for_slow = False
        self._health, self._tally, self._changed = health, tally, changed
        self._clock, self._new_id = clock, new_id
        self._journal = journal or Journal()

    def take(self) -> Launch | float | None:
        self._retry_after = None
        group = self._waiting_group() or self._open_group()
        return self._launch(group) if group is not None else self._retry_after

    def _waiting_group(self) -> OpenGroup | None:
        return next((g for g in self._waiting.values() if self._can_start(self.sources[g.env])), None)

    def _open_group(self) -> OpenGroup | None:
        if not self._admission.may_open(self.outstanding):
            return None
        name = self.mix.pick([name for name, source in self.sources.items() if self._can_start(source)])
        if name is None:
            return None
        source = self.sources[name]
        index = source.next_task()
        group = OpenGroup(self._new_id(), name, source.tasks[index], index, self._admission.version, source.group_size)
        self.open[group.id] = self._waiting[group.id] = group
        self.outstanding += group.size
        self.mix.took(name, source.group_size)
        self._journal.decided(Opened(self._journal.short(group.id), name, index, group.version))
        return group

    def _can_start(self, source: Source) -> bool:
        if source.algorithm.sampler is None and not self._router.choose(""):
            return False
        if self._in_flight[source.name] >= source.capacity:
            return False
        if (wait := source.rate.wait(self._clock())) > 0:
            self._retry_after = wait if self._retry_after is None else min(wait, self._retry_after)
            return False
        return True

    def _launch(self, group: OpenGroup) -> Launch:
        source = self.sources[group.env]
        source.rate.took(self._clock())
        self._in_flight[source.name] += 1
        sampler = source.algorithm.sampler
        episode_id = group.start()
        if not group.waiting:
            del self._waiting[group.id]
        request = EpisodeRequest(
            episode_id=episode_id,
            group_id=group.id,
            task=group.task,
            engines=[sampler.base_url] if sampler else self._router.choose(group.id),
            policy=sampler.model if sampler else "policy",
            version=group.version,
            sampling=source.sampling,
            timeout=source.timeout,
        )
        return Launch(source.pool, request, group.env, self._on_finished)

    def _on_finished(self, episode: Episode) -> None:
        group = self.open[episode.group_id]
        self._in_flight[group.env] -= 1
        self._tally.saw_episode(episode)
        self._health.saw_episode(episode)
        if self._health.failure is not None:
            self._changed.set()
        if episode.error is None or episode.error.kind != "cancelled":
            self.budget.earn()
        group.on_finished(episode)
        if group.waiting:
            self._waiting[group.id] = group
        if group.settled:
            self._close(group)
        elif self._waits_for_slow or self._expiring(group):
            self._changed.set()

    def _close(self, group: OpenGroup) -> None:
        del self.open[group.id]
        self.outstanding -= group.size
        group.settled_version = max(0, self._admission.updater.newest_version)
        self._collector.add(group, self.sources[group.env])

    def close_expiring(self) -> list[str]:
        """Close the groups that no batch after this one can use without their slowest episodes, if the batch is due
        and complete with what has finished of them, and the budget allows it. Return the episodes to cancel.

        A synchronous run (lag 0) has nothing else under way, and waits for whole groups.
        """
        expiring = [group for group in self.open.values() if self._expiring(group)]
        closable = [group for group in expiring if self._enough_finished(group)]
        lost = sum(group.size for group in expiring) - sum(len(g.finished) + len(g.failed) for g in closable)
        finished = sum(len(group.finished) for group in closable)
        self._waits_for_slow = not self.budget.allows(lost)
        if not closable or self._waits_for_slow or not self._admission.completes_batch(finished):
            return []
        episodes: list[str] = []
        for group in closable:
            self.budget.spend(group.unfinished)
            self._tally.cancelled["too_old"] += group.unfinished
            group.close_early()
            self._journal.decided(ClosedEarly(self._journal.short(group.id)))
            self._waiting.pop(group.id, None)
            episodes += list(group.in_flight)
            if group.settled:  # nothing of it was in flight: the rest waited to be started, or to be tried again
                self._close(group)
        return episodes

    @property
    def holds_batch(self) -> bool:
        """True while the batch waits for groups: those closed early whose last episodes are being cancelled, or more
        slow episodes than the budget lets it do without."""
        return self._waits_for_slow or any(group.closing and not group.cancelled for group in self.open.values())

    def _expiring(self, group: OpenGroup) -> bool:
        """Tell whether the batch that is collected now is the last one that could use the group."""
        max_lag = self._admission.limits.max_lag
        if group.closing or self.sources[group.env].algorithm.sampler is not None or max_lag == 0:
            return False
        return last_chance(self._admission.step, group.version, max_lag)

    def _enough_finished(self, group: OpenGroup) -> bool:
        return len(group.finished) >= max(self.sources[group.env].at_least, LEAST_SHARE * group.size)

    def cancel_hopeless(self, step: int, max_lag: int) -> list[str]:
        """Cancel the groups that are too old for batch `step`. Return the episodes to cancel."""
        hopeless = [
            group
            for group in self.open.values()
            if too_old(step, group.version, max_lag) and self.sources[group.env].algorithm.sampler is None
        ]
        self.budget.spend(sum(group.size for group in hopeless if not group.cancelled))
        return self.cancel(hopeless, "too_old")

    def cancel_youngest(self, episodes: int) -> list[str]:
        """Cancel the youngest groups, of that many episodes at least, and requeue their tasks. See `cancel`."""
        chosen: list[OpenGroup] = []
        for group in reversed(self.open.values()):
            if sum(len(g.in_flight) for g in chosen) >= episodes:
                break
            if group.in_flight and not group.cancelled:
                chosen.append(group)
                self.sources[group.env].requeued.append(group.task_index)
        return self.cancel(chosen, "pressure")

    def cancel(self, groups: Sequence[OpenGroup], cause: str) -> list[str]:
        """Cancel whole groups, counted once by cause. Return the episodes to cancel."""
        episodes: list[str] = []
        for group in groups:
            if group.cancelled:
                continue
            group.cancel()
            self._journal.decided(Cancelled(self._journal.short(group.id), cause))
            self._waiting.pop(group.id, None)
            self._tally.cancelled[cause] += group.size
            episodes += list(group.in_flight)
            if group.settled:
                self._close(group)
        return episodes
