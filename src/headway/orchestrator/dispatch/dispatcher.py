"""Episodes in flight, of training and evaluation together, never more than the cap; each finishes exactly once."""

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.core.episodes import Episode, EpisodeError, EpisodeRequest, ErrorKind

GRACE_SECONDS = 120.0
"""Time that a runner may exceed an episode's own timeout by before it is given up."""

BURST = 64
"""Episodes started at a stretch; thousands at once would hold up everything else on the event loop."""


def random_id() -> str:
    return uuid.uuid4().hex


class EpisodeRunner(Protocol):
    """An environment's worker pool."""

    async def run(self, request: EpisodeRequest) -> Episode: ...


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

    runner: EpisodeRunner
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
    task: "asyncio.Task[Episode]"


class Dispatcher:
    """Starts what its works offer while there is room, sharing it evenly between those that have something."""

    def __init__(
        self, router: EngineRouter, works: Sequence[Work], cap: int, grace_seconds: float = GRACE_SECONDS
    ) -> None:
        self.cap = cap
        self.finished = 0
        self._router = router
        self._works = works
        self._grace_seconds = grace_seconds
        self._in_flight: dict[str, _InFlight] = {}
        self._held = [0] * len(works)
        self._timer: asyncio.TimerHandle | None = None
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
        loop = asyncio.get_running_loop()
        due = loop.time() + delay
        if self._timer is not None and not self._timer.cancelled() and loop.time() < self._timer.when() <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due, self.pump)

    def cancel(self, episode_ids: Iterable[str]) -> None:
        """Cancel episodes. They finish as errors of kind "cancelled", like any other."""
        for episode_id in episode_ids:
            if (entry := self._in_flight.get(episode_id)) is not None:
                entry.task.cancel()

    async def close(self) -> None:
        """Cancel everything and wait until it has finished."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = [entry.task for entry in self._in_flight.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        task = asyncio.get_running_loop().create_task(_run_episode(launch, self._grace_seconds))
        entry = _InFlight(launch, work, engine, task)
        self._in_flight[launch.request.episode_id] = entry
        self._held[work] += 1
        task.add_done_callback(lambda task: self._on_finished(entry, task))
        return True

    def _on_finished(self, entry: _InFlight, task: "asyncio.Task[Episode]") -> None:
        # A callback, since a task that is cancelled before its first step never runs its own `finally`.
        request = entry.launch.request
        episode = (
            failure(entry.launch, "cancelled", "cancelled by the orchestrator") if task.cancelled() else task.result()
        )
        del self._in_flight[request.episode_id]
        self._held[entry.work] -= 1
        self.finished += 1
        if entry.engine is not None:
            self._router.ended(entry.engine, engine_failed=episode.error is not None and episode.error.kind == "engine")
        entry.launch.on_finished(episode)
        self.pump()


async def _run_episode(launch: Launch, grace_seconds: float) -> Episode:
    """Turn whatever the runner does into an episode, except being cancelled."""
    request = launch.request
    try:
        async with asyncio.timeout(request.timeout + grace_seconds):
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
