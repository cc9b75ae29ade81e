"""What the whole loop does when something is wrong for good: it stops with the reason, or waits without spinning."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from orchestrator_simulation import Plan, SimWorkers, World, build, calm_plan, live

from headway.base.errors import HeadwayError
from headway.core.episodes import Episode, EpisodeError, EpisodeRequest
from headway.core.records import RolloutRecord
from headway.orchestrator.health import ENGINE_PATIENCE_SECONDS
from headway.orchestrator.untrained import KEPT
from headway.plan.virtual_time import run_virtually


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("headway").setLevel(logging.CRITICAL)


def plan() -> Plan:
    return calm_plan(steps=3, max_lag=2, episode_seconds=0.05, train_seconds=0.1, cap=16)


def run_with(change: Callable[[Episode], None], monkeypatch: pytest.MonkeyPatch, settings: Plan | None = None) -> World:
    """A run in which every finished episode is changed first."""
    monkeypatch.setattr(World, "log_untrained", _remember_untrained)
    inner = SimWorkers._episode

    async def changed(self: SimWorkers, request: EpisodeRequest) -> Episode:
        episode = await inner(self, request)
        change(episode)
        return episode

    monkeypatch.setattr(SimWorkers, "_episode", changed)
    return run_virtually(live(settings or plan()))


recorded: dict[int, list[RolloutRecord]] = {}
"""What was recorded of the episodes that were not trained, by step."""


def _remember_untrained(self: World, step: int, records: list[RolloutRecord]) -> None:
    recorded[step] = records


@pytest.fixture(autouse=True)
def _nothing_recorded() -> None:
    recorded.clear()


def test_an_environment_that_always_fails_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(episode: Episode) -> None:
        episode.error = EpisodeError("environment", "KeyError: 'answer'")

    with pytest.raises(HeadwayError, match=r"(?s)100% of the last 256 episodes failed.*256 x environment: KeyError"):
        run_with(fail, monkeypatch)
    assert [(record.cause, record.episode.error) for record in recorded[1]] == [
        ("failed", EpisodeError("environment", "KeyError: 'answer'"))
    ] * KEPT


def test_rewards_that_never_differ_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def flatten(episode: Episode) -> None:
        episode.traces[0].reward = 1.0

    settings = plan()
    monkeypatch.setattr(Plan, "settings", _with_few_empty_batches(Plan.settings))
    with pytest.raises(HeadwayError, match="no group of the last 32 episodes"):
        run_with(flatten, monkeypatch, settings)
    assert [(record.cause, record.reward) for record in recorded[1]] == [("zero_advantage", 1.0)] * KEPT


def _with_few_empty_batches(inner: Callable[[Plan], object]) -> Callable[[Plan], object]:
    return lambda plan: inner(plan).model_copy(update={"max_empty_batches": 2})  # type: ignore[attr-defined]


def test_engines_that_never_serve_an_episode_stop_the_run_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []

    def fail(episode: Episode) -> None:
        times.append(asyncio.get_running_loop().time())
        episode.error = EpisodeError("engine", "it answers garbage")

    with pytest.raises(HeadwayError, match="it answers garbage"):
        run_with(fail, monkeypatch)
    assert times[-1] - times[0] > ENGINE_PATIENCE_SECONDS
    assert len(times) < 2_000, "an engine that fails episodes rests between tries"


def test_without_a_trainer_it_waits_with_what_it_may_send() -> None:
    async def main() -> World:
        world = World(plan())
        world.announce(0)
        world.orchestrator = build(world)
        running = asyncio.ensure_future(world.orchestrator.run())
        await asyncio.sleep(300)
        started = len(world.started)
        await asyncio.sleep(300)
        assert len(world.started) == started, "nothing is sampled that could not be used"
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return world

    world = run_virtually(main())
    assert sorted(world.sent) == [1, 2], "one batch ahead, as run_ahead allows"
    assert world.running == 0


def test_without_engines_it_waits_and_starts_nothing() -> None:
    async def main() -> None:
        world = World(plan())
        world.announce(0)
        world.find = dict  # type: ignore[method-assign]
        world.orchestrator = build(world)
        running = asyncio.ensure_future(world.orchestrator.run())
        await asyncio.sleep(600)
        assert not running.done() and not world.started
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run_virtually(main())
