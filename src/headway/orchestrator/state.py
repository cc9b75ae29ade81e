"""What the orchestrator must remember to go on after a restart, written with every batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.core.errors import HeadwayError
from headway.orchestrator.collect.ready import ReadyQueue
from headway.orchestrator.dispatch.training import Source, TrainingWork


class SourceState(msgspec.Struct):
    """`owed` are tasks whose groups were on their way: they are run again."""

    curriculum: dict[str, Any]
    algorithm: dict[str, Any]
    owed: list[int]


class State(msgspec.Struct):
    """After batch `step`."""

    step: int = 0
    evaluated: int = -1
    pace: float = 1.0
    empty_episodes: int = 0
    mix: dict[str, int] = msgspec.field(default_factory=dict)
    sources: dict[str, SourceState] = msgspec.field(default_factory=dict)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes, where: str) -> "State":
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise HeadwayError(f"{where}: not an orchestrator's state ({error})") from None


def save_sources(work: TrainingWork, scoring: Sequence[tuple[str, int]], ready: ReadyQueue) -> dict[str, SourceState]:
    """`scoring` and what else is on its way, as (environment, task), is owed."""
    owed: dict[str, list[int]] = {name: [] for name in work.sources}
    for env, index in scoring:
        owed[env].append(index)
    for group in ready.groups:
        owed[group.group.env].append(group.task_index)
    for opened in work.open.values():
        if not opened.cancelled:
            owed[opened.env].append(opened.task_index)
    return {
        name: SourceState(source.curriculum.save(), source.algorithm.save(), [*owed[name], *source.owed])
        for name, source in work.sources.items()
    }


def load_sources(sources: Mapping[str, Source], states: Mapping[str, SourceState]) -> None:
    """Environments that are new since then start from the beginning; those that are gone are forgotten."""
    for name, source in sources.items():
        if (state := states.get(name)) is not None:
            source.curriculum.load(state.curriculum)
            source.algorithm.load(state.algorithm)
            source.owed = [index for index in state.owed if index < len(source.tasks)]
