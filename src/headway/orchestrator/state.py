"""State that the orchestrator resumes from after a restart, written with every batch."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headway.orchestrator.dispatch.training import TrainingWork
from headway.orchestrator.groups.open_group import OpenGroup
from headway.orchestrator.groups.ready import ReadyQueue
from headway.orchestrator.groups.sources import Source

logger = logging.getLogger(__name__)


class SourceState(msgspec.Struct):
    """`requeued` are tasks whose groups were not trained yet: they are run again."""

    curriculum: dict[str, Any]
    algorithm: dict[str, Any]
    requeued: list[int]


class OrchestratorState(msgspec.Struct):
    """The state after batch `step`."""

    step: int = 0
    evaluated: int = -1
    pace: float = 1.0
    empty_episodes: int = 0
    mix: dict[str, int] = msgspec.field(default_factory=dict)
    sources: dict[str, SourceState] = msgspec.field(default_factory=dict)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def newest(cls, saved: Iterable[tuple[int, bytes]]) -> "OrchestratorState | None":
        """Decode the newest of the states, given newest first, that is whole; None where none is."""
        for step, data in saved:
            try:
                return msgspec.json.decode(data, type=cls)
            except msgspec.DecodeError as error:
                logger.warning("the state after batch %d is damaged (%s); an older one is used", step, error)
        return None


def save_sources(work: TrainingWork, scoring: Iterable[OpenGroup], ready: ReadyQueue) -> dict[str, SourceState]:
    """Save every source. Groups that are open, being scored or ready are run again after a restart."""
    open_groups = [group for group in work.open.values() if not group.cancelled]
    unfinished = [(group.env, group.task_index) for group in (*scoring, *open_groups)]
    unfinished += [(group.group.env, group.task_index) for group in ready.groups]
    requeued: dict[str, list[int]] = {name: [] for name in work.sources}
    for env, task_index in unfinished:
        requeued[env].append(task_index)
    return {
        name: SourceState(source.curriculum.save(), source.algorithm.save(), [*requeued[name], *source.requeued])
        for name, source in work.sources.items()
    }


def load_sources(sources: Mapping[str, Source], states: Mapping[str, SourceState]) -> None:
    """Restore sources. New environments start from the beginning; those that are gone are ignored."""
    for name, source in sources.items():
        if (state := states.get(name)) is not None:
            source.curriculum.load(state.curriculum)
            source.algorithm.load(state.algorithm)
            source.requeued = [index for index in state.requeued if index < len(source.tasks)]
