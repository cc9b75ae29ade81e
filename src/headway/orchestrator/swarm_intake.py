"""Intake of verified groups of a swarm: they enter where groups of the run's own engines are settled."""

import asyncio
import logging

from headway.core.errors import HeadwayError
from headway.orchestrator.dispatch.groups import OpenGroup
from headway.orchestrator.dispatch.staleness import too_old
from headway.orchestrator.loop import Orchestrator
from headway.swarm.spool import Spool, VerifiedGroup, read_group

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
                self._orchestrator.tally.dropped["stale"] += len(group.episodes)
                path.unlink(missing_ok=True)
            elif self._wanted(group):
                path.unlink(missing_ok=True)
                self._add(group)

    def _wanted(self, group: VerifiedGroup) -> bool:
        return self._orchestrator.admission.wants(group.version, self._orchestrator.training.outstanding)

    def _add(self, verified: VerifiedGroup) -> None:
        training = self._orchestrator.training
        source = training.sources.get(verified.env)
        if source is None:
            raise HeadwayError(f"a verified group is of environment {verified.env}, which this run does not train on")
        task = verified.episodes[0].task
        group = OpenGroup(verified.id, verified.env, task, verified.task, verified.version, len(verified.episodes))
        group.waiting.clear()
        group.finished = verified.episodes
        group.settled_version = max(0, self._orchestrator.updater.newest_version)
        for episode in verified.episodes:
            self._orchestrator.tally.saw_episode(episode)
            self._orchestrator.health.saw_episode(episode)
        training.mix.took(verified.env, group.size)
        self._orchestrator.collector.add(group, source)

    def _take_back(self, id: str) -> None:
        """Drop a group of a worker that was cut off, if no batch has it yet; later, while it is being scored."""
        if id in self._orchestrator.collector.scoring:
            return
        self._revoked.discard(id)
        ready = self._orchestrator.ready.remove(id)
        if ready is not None:
            logger.info("a group of a worker that was cut off is dropped")
            self._orchestrator.tally.dropped["refused"] += ready.episodes
