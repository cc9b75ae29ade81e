"""Episodes in flight, of training and evaluation together, never more than the cap; each finishes exactly once."""

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.core.episodes import Episode, EpisodeError, EpisodeRequest, ErrorKind
from headway.core.journal import Finished, Pumped
from headway.orchestrator.background import Background, LoopBackground
from headway.orchestrator.groups.sources import EpisodePool
from headway.orchestrator.journaling import Journal

GRACE_SECONDS = 120.0
"""Time that a pool may exceed an episode's own timeout by before it is given up."""

BURST = 64
"""Episodes started at a stretch; thousands at once would hold up everything else on the event loop."""


def random_id() -> str:
    return uuid.uuid4().hex


class EngineRouter(Protocol):
    """The fleet, as the dispatcher sees it."""

    def choose(self, group_id: str) -> list[str]:
        """Return engines in order of preference; none while the fleet can't serve."""
        ...

    @property
    def version(self) -> int:
        """The oldest version that an episode starting now may be sampled from."""
        ...

    def started(self, engine: str) -> None: ...

    def ended(self, engine: str, *, engine_failed: bool) -> None: ...


@dataclass(slots=True)
class Launch:
    """An episode to run. `on_finished` is called once, whatever happens."""

    pool: EpisodePool
    request: EpisodeRequest
    env: str
    on_finished: Callable[[Episode], None]


class Work(Protocol):
    """Something that wants episodes run: training, or an evaluation."""

    def take(self) -> Launch | float | None:
        """Return the next episode to start, or the seconds until there is one, or None while there is nothing."""
        ...


@dataclass(slots=True)
class _InFlight:
    launch: Launch
    work: int
    engine: str | None


class Dispatcher:
    """Starts what its works offer while there is room, sharing it evenly between those that have something."""

    def __init__(
        self,
        router: EngineRouter,
        works: Sequence[Work],
        cap: int,
        grace_seconds: float = GRACE_SECONDS,
        *,
        background: Background | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.cap = cap
        self.finished = 0
        self._router = router
        self._works = works
        self._grace_seconds = grace_seconds
        self._background, self._journal = background or LoopBackground(), journal or Journal()
        self._in_flight: dict[str, _InFlight] = {}
        self._held = [0] * len(works)
        self._closed = False

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def pump(self) -> None:
        """Start as much as there is room for. Call it whenever something changed."""
        for _ in range(BURST):
            if self._closed or self.in_flight >= self.cap:
                return
            if not any(self._start_from(work) for work in self._least_served_first()):
                return
        self.pump_later(0)

    def pump_later(self, delay: float) -> None:
        """Pump again in `delay` seconds, for work that waits for time to pass."""
        self._background.call_later(delay, self.pump_now)

    def pump_now(self) -> None:
        """Pump because time has passed."""
        self._journal.input(Pumped())
        self.pump()

    def cancel(self, episode_ids: Iterable[str]) -> None:
        """Cancel episodes. They finish as errors of kind "cancelled", like any other."""
        for episode_id in episode_ids:
            self._background.cancel(episode_id)

    async def close(self) -> None:
        """Cancel everything and wait until it has finished."""
        self._closed = True
        await self._background.close()

    def _least_served_first(self) -> list[int]:
        return sorted(range(len(self._works)), key=lambda work: self._held[work])

    def _start_from(self, work: int) -> bool:
        launch = self._works[work].take()
        if launch is None:
            return False
        if isinstance(launch, float):
            self.pump_later(launch)
            return False
        engine = None
        if launch.request.engines:
            engine = launch.request.engines[0]
            self._router.started(engine)
        request = launch.request
        self._in_flight[request.episode_id] = _InFlight(launch, work, engine)
        self._held[work] += 1
        self._background.start(
            request.episode_id,
            lambda: _run_episode(launch, self._grace_seconds),
            lambda task: self._ended(launch, task),
        )
        return True

    def _ended(self, launch: Launch, task: "asyncio.Task[Episode]") -> None:
        cancelled = task.cancelled()
        self.on_finished(failure(launch, "cancelled", "cancelled by the orchestrator") if cancelled else task.result())

    def launch_of(self, episode_id: str) -> Launch:
        """Return an episode in flight as it was launched. Raises KeyError for any other."""
        return self._in_flight[episode_id].launch

    def on_finished(self, episode: Episode) -> None:
        """Take an episode that was in flight, hand it to whoever launched it, and start others."""
        kind = episode.error.kind if episode.error is not None else ""
        self._journal.input(Finished(0, self._journal.short(episode.id), kind))
        entry = self._in_flight.pop(episode.id)
        self._held[entry.work] -= 1
        self.finished += 1
        if entry.engine is not None:
            self._router.ended(entry.engine, engine_failed=kind == "engine")
        entry.launch.on_finished(episode)
        self.pump()


async def _run_episode(launch: Launch, grace_seconds: float) -> Episode:
    """Turn whatever the pool does into an episode, except being cancelled."""
    request = launch.request
    try:
        async with asyncio.timeout(request.timeout + grace_seconds):
            episode = await launch.pool.run(request)
    except TimeoutError:
        return failure(launch, "timeout", f"no answer from the environment's workers in {request.timeout:g} s")
    except Exception as error:
        return failure(launch, "worker", f"{type(error).__name__}: {error}")
    if not isinstance(episode, Episode) or episode.id != request.episode_id:
        return failure(launch, "worker", "the environment's workers answered with something else")
    return episode


def failure(launch: Launch, kind: ErrorKind, message: str) -> Episode:
    request = launch.request
    return Episode(
        id=request.episode_id,
        group_id=request.group_id,
        env=launch.env,
        task=request.task,
        policy=request.policy,
        version=request.version,
        error=EpisodeError(kind, message),
        evaluation=request.evaluation,
    )
