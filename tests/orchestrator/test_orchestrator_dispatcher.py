"""Episodes in flight: never more than the cap, shared between works, back exactly once whatever the workers do."""

import asyncio

import pytest

from headway.core.episodes import Episode, EpisodeRequest, Task
from headway.orchestrator.dispatch.dispatcher import BURST, GRACE_SECONDS, Dispatcher, Launch
from headway.plan.virtual_time import run_virtually


class NoFleet:
    def __init__(self) -> None:
        self.blamed: list[str] = []

    version = 0

    def choose(self, group_id: str) -> list[str]:
        return ["http://a"]

    def started(self, engine: str) -> None:
        pass

    def ended(self, engine: str, *, engine_failed: bool) -> None:
        self.blamed += [engine] if engine_failed else []


class Workers:
    """Takes a second per episode, or misbehaves as its task says."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def run(self, request: EpisodeRequest) -> Episode:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._run(request)
        finally:
            self.running -= 1

    async def _run(self, request: EpisodeRequest) -> Episode:
        match request.task.id:
            case "raises":
                raise ValueError("a bug in the pool")
            case "hangs":
                await asyncio.sleep(10**9)
            case "lies":
                return Episode("someone else's", "g", "env", request.task)
            case "nonsense":
                return "not an episode"  # type: ignore[return-value]
        await asyncio.sleep(1)
        return Episode(request.episode_id, request.group_id, "env", request.task)


class Jobs:
    """A work of so many episodes."""

    def __init__(self, workers: Workers, name: str, tasks: list[str]) -> None:
        self.workers, self.name = workers, name
        self.waiting = [(f"{name}{i}", task) for i, task in enumerate(tasks)]
        self.back: list[Episode] = []

    def take(self) -> Launch | None:
        if not self.waiting:
            return None
        episode_id, task = self.waiting.pop(0)
        request = EpisodeRequest(episode_id, "g", Task(task), ["http://a"], timeout=5.0)
        return Launch(self.workers, request, "env", self.back.append)


def test_the_cap_holds_and_everything_comes_back_once() -> None:
    async def main() -> None:
        workers = Workers()
        jobs = Jobs(workers, "t", ["fine"] * (3 * BURST))
        dispatcher = Dispatcher(NoFleet(), [jobs], cap=2 * BURST)
        dispatcher.pump()
        assert dispatcher.in_flight == BURST, "a burst at a time, so that the loop stays responsive"
        await asyncio.sleep(10)
        assert workers.most == 2 * BURST and len({e.id for e in jobs.back}) == len(jobs.back) == 3 * BURST
        assert dispatcher.in_flight == 0 and dispatcher.finished == 3 * BURST

    run_virtually(main())


def test_training_and_evaluation_share_evenly_and_take_what_the_other_leaves() -> None:
    async def main() -> None:
        workers = Workers()
        training, evaluation = Jobs(workers, "t", ["fine"] * 50), Jobs(workers, "e", ["fine"] * 5)
        dispatcher = Dispatcher(NoFleet(), [training, evaluation], cap=10)
        dispatcher.pump()
        assert (50 - len(training.waiting), 5 - len(evaluation.waiting)) == (5, 5)
        await asyncio.sleep(1.5)
        assert 50 - len(training.waiting) == 15, "with no evaluation left, training has all of it"
        await dispatcher.close()

    run_virtually(main())


@pytest.mark.parametrize(
    ("task", "kind", "seconds"),
    [
        ("raises", "worker", 0),
        ("hangs", "timeout", 5 + GRACE_SECONDS),
        ("lies", "worker", 0),
        ("nonsense", "worker", 0),
    ],
)
def test_whatever_workers_do_becomes_an_error(task: str, kind: str, seconds: float) -> None:
    async def main() -> None:
        jobs = Jobs(Workers(), "t", [task])
        dispatcher = Dispatcher(NoFleet(), [jobs], cap=1)
        dispatcher.pump()
        await asyncio.sleep(seconds + 1)
        (episode,) = jobs.back
        assert episode.id == "t0" and episode.error is not None and episode.error.kind == kind

    run_virtually(main())


def test_a_call_back_returns_once_even_before_the_first_step() -> None:
    async def main() -> None:
        jobs = Jobs(Workers(), "t", ["fine", "hangs"])
        dispatcher = Dispatcher(NoFleet(), [jobs], cap=2)
        dispatcher.pump()
        dispatcher.cancel(["t0", "t0", "unknown"])
        await asyncio.sleep(0.5)
        dispatcher.cancel(["t1"])
        await asyncio.sleep(0.5)
        assert [(e.id, e.error.kind if e.error else None) for e in jobs.back] == [
            ("t0", "cancelled"),
            ("t1", "cancelled"),
        ]
        assert dispatcher.in_flight == 0

    run_virtually(main())


def test_nothing_starts_while_admission_is_stopped_or_after_the_end() -> None:
    async def main() -> None:
        jobs = Jobs(Workers(), "t", ["fine"] * 4)
        dispatcher = Dispatcher(NoFleet(), [jobs], cap=2)
        dispatcher.cap = 0
        dispatcher.pump()
        assert dispatcher.in_flight == 0
        dispatcher.cap = 2
        dispatcher.pump_later(3.0)
        dispatcher.pump_later(1.0)
        await asyncio.sleep(1.5)
        assert dispatcher.in_flight == 2
        await dispatcher.close()
        dispatcher.pump()
        assert dispatcher.in_flight == 0 and len(jobs.back) == 2 and len(jobs.waiting) == 2

    run_virtually(main())
