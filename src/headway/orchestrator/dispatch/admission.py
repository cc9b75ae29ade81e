"""Admission: decides when new groups may open and when a batch may be sent, within the bounds on staleness."""

from dataclasses import dataclass
from typing import Protocol

from headway.orchestrator.collect.collector import Collector
from headway.orchestrator.fleet.updates import WeightUpdater
from headway.orchestrator.groups.ready import ReadyGroup, ReadyQueue
from headway.orchestrator.groups.staleness import StalenessLimits, may_open_group, may_send, next_pace


class ServedVersion(Protocol):
    @property
    def version(self) -> int: ...


@dataclass(slots=True)
class Admission:
    """The state that admission depends on. Batch `step` is collected now; `pace` is how many batches' worth of
    episodes to have under way; `frozen` says that no episode is sampled by the policy."""

    limits: StalenessLimits
    fleet: ServedVersion
    updater: WeightUpdater
    ready: ReadyQueue
    collector: Collector
    frozen: bool
    pace: float
    step: int = 1
    trainer_bound: bool = False

    @property
    def version(self) -> int:
        """The version that episodes starting now are sampled from. Frozen samplers need no engine of the run's."""
        return self.updater.newest_version if self.frozen else self.fleet.version

    def may_open(self, outstanding: int) -> bool:
        """Tell whether one more group is wanted, with `outstanding` episodes in open groups."""
        if self.updater.busy and self.trainer_bound:
            return False  # there is time to start with the new weights instead of the old
        return self.wants(self.version, outstanding)

    def wants(self, version: int, outstanding: int) -> bool:
        """Tell whether batches could use one more group of `version`, with `outstanding` episodes in open groups."""
        if self.full_batch_waits() and not self.may_send():
            return False  # until the trainer has time for it, more work would only grow stale
        coming = (outstanding + self.collector.outstanding) * self.collector.useful_share
        return may_open_group(self.step, version, self.ready.episodes, coming, self.pace, self.limits)

    def may_send(self) -> bool:
        return may_send(self.step, self.updater.newest_version, self.limits)

    def full_batch_waits(self) -> bool:
        return self.ready.episodes >= self.limits.batch_size

    def completes_batch(self, episodes: int) -> bool:
        """Tell whether the batch could be sent if `episodes` more were ready, and is due: it is full without them, or
        the trainer waits for it."""
        if not self.may_send():
            return False
        more = (episodes + self.collector.outstanding) * self.collector.useful_share
        due = self.full_batch_waits() or self.updater.newest_version >= self.step - 1
        return due and self.ready.episodes + more >= self.limits.batch_size

    def take_batch(self) -> list[ReadyGroup] | None:
        """Remove and return the groups of batch `step`; None while there are too few, or the trainer isn't ready."""
        return self.ready.take(self.limits.batch_size) if self.may_send() else None

    def learn_pace(self, waited: float, seconds: float) -> None:
        """Learn from a batch that took `seconds` and was complete for `waited` of them before it could be sent."""
        self.trainer_bound = waited > 0
        self.pace = next_pace(
            self.pace,
            trainer_starved=self.updater.newest_version >= self.step - 1 > 0,
            waited_share=waited / max(seconds, 1e-9),
            limits=self.limits,
        )
