"""Intake of verified groups of a swarm: they enter where groups of the run's own engines are settled."""

import asyncio
import logging
from collections.abc import Sequence

from headway.base.errors import HeadwayError
from headway.core.episodes import Episode
from headway.core.journal import Arrived, Discarded
from headway.orchestrator.groups.open_group import OpenGroup
from headway.orchestrator.groups.staleness import too_old
from headway.orchestrator.loop import Orchestrator
from headway.swarm.work.spool import Spool, VerifiedGroup, read_group

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1


class SwarmIntake:
    """Takes groups from the spool when the next batches can use them, and hands them to the collector.

    What they can't use stays in the spool: the service gives no more orders then.
    """

    def __init__(self, orchestrator: Orchestrator, spool: Spool) -> None:
        self._orchestrator, self._spool = orchestrator, spool
        self._revoked: set[str] = set()

    async def watch(self) -> None:
        """Take groups until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Take what is there and wanted; remove what is too old, or was taken back."""
        self._revoked.update(self._spool.take_dropped())
        for id in list(self._revoked):
            self._take_back(id)
        for path in self._spool.waiting():
            try:
                group = read_group(path)
            except FileNotFoundError:
                continue
            if too_old(self._orchestrator.admission.step, group.version, self._orchestrator.admission.limits.max_lag):
                path.unlink(missing_ok=True)
                self._discard(group.id, len(group.episodes), "stale")
            elif self._wanted(group):
                path.unlink(missing_ok=True)
                self._add(group)

    def _wanted(self, group: VerifiedGroup) -> bool:
        return self._orchestrator.admission.wants(group.version, self._orchestrator.training.outstanding)

    def _add(self, verified: VerifiedGroup) -> None:
        short = self._orchestrator.journal.short(verified.id)
        arrived = Arrived(0, short, verified.env, verified.task, verified.version, len(verified.episodes))
        take_group(self._orchestrator, arrived, verified.episodes)

    def _take_back(self, id: str) -> None:
        """Drop a group of a worker that was cut off, if no batch has it yet; later, while it is being scored."""
        if id in self._orchestrator.collector.scoring:
            return
        self._revoked.discard(id)
        ready = next((ready for ready in self._orchestrator.ready.groups if ready.group.id == id), None)
        if ready is not None:
            logger.info("a group of a worker that was cut off is dropped")
            self._discard(id, ready.episodes, "refused")

    def _discard(self, id: str, episodes: int, cause: str) -> None:
        discard_group(self._orchestrator, Discarded(0, self._orchestrator.journal.short(id), episodes, cause))


def take_group(orchestrator: Orchestrator, arrived: Arrived, episodes: Sequence[Episode]) -> None:
    """Hand a verified group to the collector, as if its last episode had just finished."""
    training = orchestrator.training
    source = training.sources.get(arrived.env)
    if source is None:
        raise HeadwayError(f"a verified group is of environment {arrived.env}, which this run does not train on")
    orchestrator.journal.input(arrived)
    id, task = orchestrator.journal.full(arrived.group), episodes[0].task
    group = OpenGroup(id, arrived.env, task, arrived.task, arrived.version, arrived.size)
    group.waiting.clear()
    group.finished = list(episodes)
    group.settled_version = max(0, orchestrator.updater.newest_version)
    for episode in episodes:
        orchestrator.tally.saw_episode(episode)
        orchestrator.health.saw_episode(episode)
    training.mix.took(arrived.env, group.size)
    orchestrator.collector.add(group, source)


def discard_group(orchestrator: Orchestrator, discarded: Discarded) -> None:
    """Drop a group of a swarm, taken or not, and count its episodes."""
    orchestrator.journal.input(discarded)
    orchestrator.ready.remove(orchestrator.journal.full(discarded.group))
    orchestrator.tally.dropped[discarded.cause] += discarded.episodes
