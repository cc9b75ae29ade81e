"""Replay of an orchestrator's decisions: its own code gets the inputs of a journal, one after the other, and decides
again; recorded episodes stand in for engines and environments."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from headway.algorithms.base import Group, Rollout
from headway.core.episodes import Episode, EpisodeError
from headway.core.journal import (
    Arrived,
    Began,
    Discarded,
    Finished,
    Input,
    Judged,
    Looked,
    Pumped,
    Scored,
    Seen,
    Steered,
    Updated,
)  # fmt: skip
from headway.core.protocol import WeightUpdate
from headway.orchestrator.collect.collector import checked_samples
from headway.orchestrator.loop import NextBatch, Orchestrator
from headway.orchestrator.swarm_intake import discard_group, take_group
from headway.replay.lives import Life
from headway.replay.world import DivergedError, ReplayFleet, ReplayJournal

EpisodesOf = Callable[[str], Sequence[Episode]]
"""Returns the recorded episodes of a group, by its id; none for groups that were not trained."""


class LifeReplay:
    """One life of an orchestrator again. Groups without recorded episodes get the outcome that the journal has."""

    def __init__(
        self, life: Life, orchestrator: Orchestrator, fleet: ReplayFleet, journal: ReplayJournal, episodes: EpisodesOf
    ) -> None:
        self._life, self._orchestrator, self._fleet = life, orchestrator, fleet
        self._journal, self._episodes = journal, episodes

    def batches(self) -> Iterator[NextBatch]:
        """Yield the batches that the run kept. Raises DivergedError where it decides otherwise than the run did."""
        last_input, last_step = self._life.reactions[-1], max(self._life.kept, default=0)
        for reaction in self._life.reactions:
            self._journal.expect(reaction.input, reaction.decisions)
            if reaction.seen is not None:
                self._see(reaction.seen)
            batch = self._react(reaction.input)
            if batch is not None and batch.step in self._life.kept:
                yield batch
            if self._orchestrator.admission.step > last_step:
                return  # no batch depends on what follows
            if reaction is not last_input:  # of that, a crash may have lost some decisions
                self._journal.check_all_decided()

    def _see(self, seen: Seen) -> None:
        self._fleet.version = seen.served
        updater = self._orchestrator.updater
        updater.busy = seen.updating
        if seen.newest >= 0:
            updater.note(WeightUpdate(seen.newest, seen.fingerprint, {"type": "recorded"}))

    def _react(self, input_: Input) -> NextBatch | None:
        orchestrator = self._orchestrator
        match input_:
            case Began():
                orchestrator.start()
            case Finished():
                orchestrator.dispatcher.on_finished(self._finished(input_))
            case Arrived():
                take_group(orchestrator, input_, self._arrived(input_))
            case Discarded():
                discard_group(orchestrator, input_)
            case Scored():
                self._score(input_)
            case Looked():
                return orchestrator.look()
            case Pumped():
                orchestrator.dispatcher.pump_now()
            case Steered():
                self._fleet.reported = input_
                orchestrator.steer()
            case Updated():
                orchestrator.updated(input_.version)
        return None

    def _finished(self, event: Finished) -> Episode:
        """Make the episode as far as the dispatcher and groups look at it: what it holds is looked up when scored."""
        try:
            launch = self._orchestrator.dispatcher.launch_of(self._journal.full(event.episode))
        except KeyError:
            raise DivergedError(f"episode {event.episode} finished in the run, but is not in flight here") from None
        request = launch.request
        episode = Episode(request.episode_id, request.group_id, launch.env, request.task, version=request.version)
        if event.error:
            episode.error = EpisodeError(event.error, "")  # type: ignore[arg-type]  # a kind when it was written
        return episode

    def _arrived(self, event: Arrived) -> list[Episode]:
        """Make the episodes of a swarm's group, as `_finished` does."""
        id, task = self._journal.full(event.group), self._orchestrator.training.sources[event.env].tasks[event.task]
        return [Episode(f"{id}-{n}", id, event.env, task, version=event.version) for n in range(event.size)]

    def _score(self, event: Scored) -> None:
        collector = self._orchestrator.collector
        settled = collector.scoring.get(self._journal.full(event.group))
        if settled is None:
            raise DivergedError(f"group {event.group} was scored in the run, but is not complete here")
        source = self._orchestrator.training.sources[settled.env]
        episodes = self._episodes(settled.id)
        if episodes:
            rollouts = [Rollout(episode, checked_samples(episode)) for episode in episodes]
            collector.conclude(settled, source, Group(settled.id, settled.env, episodes[0].task, rollouts))
        elif (outcome := self._journal.next_of(Judged)) is not None:
            if outcome.algorithm:
                source.algorithm.load(msgspec.json.decode(outcome.algorithm))
            collector.apply(outcome, settled, source, Group(settled.id, settled.env, settled.task, []), [])
