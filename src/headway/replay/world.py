"""The world of a replayed orchestrator: a fleet that looks as it was seen then, and nothing that runs."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from headway.base.errors import HeadwayError
from headway.core.episodes import Episode, EpisodeRequest
from headway.core.journal import Began, Event, Input, Opened, Steered
from headway.core.protocol import WeightReply, WeightUpdate
from headway.core.records import RolloutRecord
from headway.orchestrator.groups.concurrency import Load
from headway.orchestrator.groups.ready import ReadyGroup
from headway.orchestrator.journaling import Journal

T = TypeVar("T")


class DivergedError(HeadwayError):
    """The replayed orchestrator decided otherwise than the one that wrote the journal."""


class ReplayJournal(Journal):
    """Gives the orchestrator the time of its inputs, and compares what it decides with what was decided then."""

    def __init__(self, prefix: str) -> None:
        super().__init__(clock=lambda: 0.0, prefix=prefix)
        self._expected: list[Event] = []
        self._where = ""

    def expect(self, input_: Input, decisions: Sequence[Event]) -> None:
        self._milliseconds += input_.after
        self._expected = list(decisions)
        self._where = f"{type(input_).__name__} at {self.clock():.3f} s"

    def next_of(self, kind: type[T]) -> T | None:
        """Return the next decision of that kind among those expected."""
        return next((event for event in self._expected if isinstance(event, kind)), None)

    def input(self, event: Input) -> None:
        pass

    def decided(self, event: Event) -> None:
        expected = self._expected.pop(0) if self._expected else None
        if event != expected:
            raise DivergedError(
                f"the replay decides otherwise than the run did after {self._where}: {event} instead of {expected}; "
                "was the run made by another version of Headway, or with code of yours that has changed?"
            )

    def check_all_decided(self) -> None:
        if self._expected:
            raise DivergedError(f"after {self._where} the run decided {self._expected[0]}, the replay did not")


class ReplayFleet:
    """The engines as they were seen. Nothing reaches them."""

    def __init__(self) -> None:
        self.version = -1
        self.reported = Steered()
        self.changed = asyncio.Event()

    def choose(self, group_id: str) -> list[str]:
        return ["recorded"] if self.version >= 0 else []

    def started(self, engine: str) -> None: ...

    def ended(self, engine: str, *, engine_failed: bool) -> None: ...

    def load(self, in_flight: int, finished: int) -> Load | None:
        seen = self.reported
        if seen.running < 0:
            return None
        return Load(in_flight, finished, seen.running, seen.waiting, seen.kv_usage, seen.preemptions)

    async def watch(self) -> None: ...

    async def publish(self, update: WeightUpdate) -> list[WeightReply]:
        return []


class NothingRuns:
    """Background work that never starts: what would come of it is in the journal."""

    def start(
        self, name: str, work: Callable[[], Coroutine[Any, Any, T]], done: Callable[["asyncio.Task[T]"], None]
    ) -> None: ...

    def cancel(self, name: str) -> None: ...

    def call_later(self, delay: float, call: Callable[[], None]) -> None: ...

    async def close(self) -> None: ...


class NoRunner:
    """Workers of an environment that nobody asks."""

    async def run(self, request: EpisodeRequest) -> Episode:
        raise AssertionError("a replay runs no episodes")


class StateOf:
    """The outbox of an orchestrator that starts where a journal says it did."""

    def __init__(self, began: Began) -> None:
        self._began = began

    async def send(self, step: int, groups: Sequence[ReadyGroup], metrics: dict[str, float], state: bytes) -> bytes:
        raise AssertionError("a replay hands its batches out")

    def last_step(self) -> int:
        return self._began.step

    def needed(self) -> bool:
        return False

    def load_states(self) -> Iterator[tuple[int, bytes]]:
        if self._began.state:
            yield self._began.step, self._began.state


class NoMetrics:
    def log(self, step: int, values: dict[str, float]) -> None: ...

    def log_untrained(self, step: int, records: Sequence[RolloutRecord]) -> None: ...


class RecordedDraws:
    """A curriculum that draws what was drawn then, for samplers of one's own that need the real tasks."""

    def __init__(self, journal: ReplayJournal) -> None:
        self._journal = journal

    def next(self) -> int:
        opened = self._journal.next_of(Opened)
        if opened is None:
            raise DivergedError("the replay opens a group where the run opened none")
        return opened.task

    def report(self, index: int, reward: float) -> None: ...

    def save(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None: ...
