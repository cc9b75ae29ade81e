"""Episodes in flight, of training and evaluation together, never more than the cap; each comes back exactly once."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.core.episodes import Episode, EpisodeError, EpisodeRequest, ErrorKind

GRACE_SECONDS = 120.0
"""How long a runner may exceed an episode's own timeout before it is given up."""

BURST = 64
"""Episodes started at a stretch; thousands at once would hold up everything else on the event loop."""


class EpisodeRunner(Protocol):
    """An environment's worker pool."""

    async def run(self, request: EpisodeRequest) -> Episode: ...


class Router(Protocol):
    """The fleet, as the dispatcher sees it."""

    def choose(self, group_id: str) -> list[str]:
        """Engines in order of preference; none while the fleet can't serve."""
        ...

    def started(self, engine: str) -> None: ...

    def ended(self, engine: str, *, engine_failed: bool) -> None: ...


@dataclass(slots=True)
class Launch:
    """An episode to run. `done` is called once, whatever happens. Without `engines` the fleet is asked."""

    runner: EpisodeRunner
    request: EpisodeRequest
    env: str
    done: Callable[[Episode], None]


class Work(Protocol):
    """Something that wants episodes run: training, or an evaluation."""

    def take(self) -> Launch | None:
        """The next episode to start, None while there is nothing."""
        ...


@dataclass(slots=True)
class _Flight:
    launch: Launch
    work: int
    engine: str | None
    task: "asyncio.Task[Episode]"


class Dispatcher:
    """Starts what its works offer while there is room, sharing it evenly between those that have something."""

    def __init__(self, router: Router, works: Sequence[Work], cap: int) -> None:
        self.cap = cap
        self.finished = 0
        self._router = router
        self._works = works
        self._flights: dict[str, _Flight] = {}
        self._held = [0] * len(works)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def pump(self) -> None:
        """Start as much as there is room for. Call it whenever something changed."""
        for _ in range(BURST):
            if self._closed or self.in_flight >= self.cap:
                return
            if not any(self._start_from(work) for work in self._hungriest_first()):
                return
        self.pump_later(0)

    def pump_later(self, delay: float) -> None:
        """Pump again in `delay` seconds, for work that waits for time to pass."""
        loop = asyncio.get_running_loop()
        due = loop.time() + delay
        if self._timer is not None and not self._timer.cancelled() and loop.time() < self._timer.when() <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due, self.pump)

    def cancel(self, episode_ids: Iterable[str]) -> None:
        """Call episodes back. They return as errors of kind "cancelled", like any other."""
        for episode_id in episode_ids:
            if (flight := self._flights.get(episode_id)) is not None:
                flight.task.cancel()

    async def close(self) -> None:
        """Call everything back and wait until it is home."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _hungriest_first(self) -> list[int]:
        return sorted(range(len(self._works)), key=lambda work: self._held[work])

    def _start_from(self, work: int) -> bool:
        launch = self._works[work].take()
        if launch is None:
            return False
        engine = None
        if launch.request.engines:
            engine = launch.request.engines[0]
            self._router.started(engine)
        task = asyncio.get_running_loop().create_task(_fly(launch))
        flight = _Flight(launch, work, engine, task)
        self._flights[launch.request.episode_id] = flight
        self._held[work] += 1
        task.add_done_callback(lambda task: self._landed(flight, task))
        return True

    def _landed(self, flight: _Flight, task: "asyncio.Task[Episode]") -> None:
        # A callback, since a task that is cancelled before its first step never runs its own `finally`.
        request = flight.launch.request
        episode = failure(flight.launch, "cancelled", "called back") if task.cancelled() else task.result()
        del self._flights[request.episode_id]
        self._held[flight.work] -= 1
        self.finished += 1
        if flight.engine is not None:
            self._router.ended(
                flight.engine, engine_failed=episode.error is not None and episode.error.kind == "engine"
            )
        flight.launch.done(episode)
        self.pump()


async def _fly(launch: Launch) -> Episode:
    """Whatever the runner does becomes an episode, except being cancelled."""
    request = launch.request
    try:
        async with asyncio.timeout(request.timeout + GRACE_SECONDS):
            episode = await launch.runner.run(request)
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
