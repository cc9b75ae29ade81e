"""Scored groups that wait for their batch, oldest first; those that become too old are removed."""

from dataclasses import dataclass, field

from headway.algorithms.base import Group
from headway.core.samples import Sample
from headway.orchestrator.groups.staleness import lag, too_old


@dataclass(slots=True)
class ReadyGroup:
    """A group that may be trained: its samples after filters. `arrived_version` was current when it was complete."""

    group: Group
    samples: list[Sample]
    episodes: int
    arrived_version: int
    task_index: int = -1
    oldest_version: int = field(init=False)

    def __post_init__(self) -> None:
        self.oldest_version = min((sample.oldest_version for sample in self.samples), default=2**31 - 1)

    def lags(self, step: int) -> tuple[int, int]:
        """Return the lag in batch `step`, split into the part while it was generated and the part in this queue."""
        total = lag(step, self.oldest_version)
        in_flight = min(total, max(0, self.arrived_version - self.oldest_version))
        return in_flight, total - in_flight


class ReadyQueue:
    def __init__(self) -> None:
        self._groups: list[ReadyGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def episodes(self) -> int:
        return sum(group.episodes for group in self._groups)

    @property
    def groups(self) -> list[ReadyGroup]:
        return list(self._groups)

    def add(self, group: ReadyGroup) -> None:
        self._groups.append(group)

    def remove(self, id: str) -> ReadyGroup | None:
        """Remove and return the group of this id; None where there is none."""
        found = next((ready for ready in self._groups if ready.group.id == id), None)
        if found is not None:
            self._groups.remove(found)
        return found

    def sweep(self, step: int, max_lag: int) -> list[ReadyGroup]:
        """Remove and return the groups that are too old for batch `step`."""
        stale = [g for g in self._groups if too_old(step, g.oldest_version, max_lag)]
        if stale:
            gone = {id(g) for g in stale}
            self._groups = [g for g in self._groups if id(g) not in gone]
        return stale

    def take(self, episodes: int) -> list[ReadyGroup] | None:
        """Remove and return the oldest groups that make up at least `episodes`; None while there are too few."""
        if self.episodes < episodes:
            return None
        self._groups.sort(key=lambda g: g.oldest_version)
        taken: list[ReadyGroup] = []
        while episodes > 0:
            taken.append(self._groups.pop(0))
            episodes -= taken[-1].episodes
        return taken
