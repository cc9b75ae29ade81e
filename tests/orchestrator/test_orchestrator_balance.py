"""On a simulated clock, over many steps: nobody waits for the other more than the slower one makes them."""

import logging
from statistics import mean

import pytest
from orchestrator_simulation import World, calm_plan, live

from headway.plan.virtual_time import run_virtually

WARM_UP = 10


def run(steps: int, max_lag: int, episode_seconds: float, train_seconds: float, cap: int) -> World:
    logging.getLogger("headway").setLevel(logging.CRITICAL)
    plan = calm_plan(
        steps=steps, max_lag=max_lag, episode_seconds=episode_seconds, train_seconds=train_seconds, cap=cap
    )
    return run_virtually(live(plan))


def idle_share(world: World, train_seconds: float) -> float:
    waits = world.trainer_waits[WARM_UP:]
    return sum(waits) / (sum(waits) + train_seconds * len(waits))


def lags(world: World) -> list[float]:
    return [values["lag/mean"] for values in world.metrics if "lag/mean" in values][WARM_UP:]


def test_fast_rollouts_keep_the_trainer_busy_without_growing_stale() -> None:
    world = run(steps=60, max_lag=8, episode_seconds=0.05, train_seconds=2.0, cap=64)
    assert idle_share(world, 2.0) < 0.05
    assert mean(lags(world)) <= 2.5, "run ahead by one, and little more than that"


def test_long_episodes_are_started_early_enough() -> None:
    """An episode takes two steps' time: with enough in flight the trainer still has no reason to wait."""
    world = run(steps=80, max_lag=16, episode_seconds=1.0, train_seconds=1.0, cap=256)
    assert idle_share(world, 1.0) < 0.05


def test_slow_rollouts_use_the_whole_budget() -> None:
    world = run(steps=40, max_lag=8, episode_seconds=1.0, train_seconds=0.01, cap=16)
    in_flight = [values["in_flight"] for values in world.metrics if "in_flight" in values][WARM_UP:]
    assert mean(in_flight) > 0.95 * 16


def test_on_policy_runs_have_no_lag_at_all() -> None:
    world = run(steps=12, max_lag=0, episode_seconds=0.2, train_seconds=0.5, cap=64)
    assert [values["lag/max"] for values in world.metrics if "lag/max" in values] == [0.0] * 12


def test_a_group_is_trained_without_the_episodes_that_would_make_it_too_old() -> None:
    """One episode in twenty takes far longer than its group may: it is given up, and not the whole group."""
    logging.getLogger("headway").setLevel(logging.CRITICAL)
    plan = calm_plan(steps=60, max_lag=2, episode_seconds=0.05, train_seconds=0.2, cap=64)
    plan.hang_rate = 0.05
    world = run_virtually(live(plan))
    sizes = [len(ready.group.rollouts) for groups, _ in world.sent.values() for ready in groups]
    assert min(sizes) in (2, 3), "groups of four, of which at least half must be there"
    given_up = sum(values.get("cancelled/too_old", 0.0) for values in world.metrics)
    assert given_up < 0.1 * sum(values.get("episodes", 0.0) for values in world.metrics)


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0.0, 0.0), (0.1, 0.02, 0.1)])
def test_the_trainer_waits_for_slow_episodes_beyond_the_share_that_may_be_lost(
    share: float, least: float, most: float
) -> None:
    """Episodes are slow and the trainer is fast, so that waiting is the only way to lose few."""
    logging.getLogger("headway").setLevel(logging.CRITICAL)
    plan = calm_plan(steps=40, max_lag=1, episode_seconds=1.0, train_seconds=0.02, cap=256)
    plan.max_lost_share = share
    world = run_virtually(live(plan))
    given_up = sum(values.get("cancelled/too_old", 0.0) for values in world.metrics)
    assert least <= given_up / sum(values["episodes"] for values in world.metrics) <= most
