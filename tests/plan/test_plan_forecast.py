"""Forecasts on simulated time: simple runs come out as by hand, and more of something is never slower."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.rl import RlSettings
from headway.plan.device import Device, SimulatedEngine, SimulatedHost, SimulatedTrainer
from headway.plan.episodes import Figures, Shape, Turn, Workload
from headway.plan.forecast import Forecast, forecast
from headway.plan.speeds import LinearEngine, LinearTrainer, Speeds
from headway.plan.virtual_time import run_virtually

POLL = 0.06
"""The orchestrator looks for new weights every 50 ms."""
ROUNDING = 0.02


def settings_of(**orchestrator: Any) -> RlSettings:
    options = {"batch_size": 8, "group_size": 4, "max_lag": 2, "envs": [{"id": "reverse-text"}], **orchestrator}
    return RlSettings.model_validate({"orchestrator": options})


def engine(**changed: Any) -> LinearEngine:
    figures = {"prefill_seconds": 0.0, "kv_tokens": 10**6, "max_running": 256, "fixed": 0.01, "per_sequence": 0.0}
    return LinearEngine(**{**figures, **changed})


def trainer(seconds: float) -> LinearTrainer:
    return LinearTrainer(fixed=seconds, per_token=0.0)


SAME = Workload([Shape.of(Turn(10, 100))])
"""Every episode takes one second on an engine with steps of 10 ms, however many there are."""


def look(training: float, engines: int = 1, workload: Workload = SAME, **orchestrator: Any) -> Forecast:
    return forecast(settings_of(**orchestrator), Speeds(engine(), trainer(training)), workload, engines)


def test_a_synchronous_run_samples_and_then_trains() -> None:
    expected = look(2.0, max_lag=0)
    assert 3.0 <= expected.step_seconds <= 3.0 + POLL + ROUNDING
    assert expected.lag_mean == expected.lag_max == 0
    assert expected.trainer_waiting == pytest.approx(1 / 3, abs=0.03)
    assert expected.engines_idle == pytest.approx(2 / 3, abs=0.03)


def test_a_run_bound_by_training_takes_as_long_as_training() -> None:
    expected = look(2.0)
    assert expected.step_seconds == pytest.approx(2.0, abs=ROUNDING)
    assert expected.trainer_waiting < 0.01
    assert 1 <= expected.lag_max <= 2


def test_a_run_bound_by_sampling_takes_as_long_as_its_slots_need() -> None:
    slots = {"min": 4, "max": 4, "initial": 4}
    expected = look(0.01, concurrency=slots)
    # Eight episodes of a second each in four slots.
    assert expected.step_seconds == pytest.approx(2.0, abs=2 * ROUNDING)
    assert expected.trainer_waiting > 0.95


def test_turns_and_environments_take_their_time() -> None:
    turns = Workload([Shape.of(Turn(10, 50, 0.5), Turn(10, 50, 1.0))])
    assert look(0.01, workload=turns, max_lag=0).step_seconds == pytest.approx(2.5, abs=POLL + 3 * ROUNDING)


def test_groups_that_filters_drop_are_sampled_for_nothing() -> None:
    slots = {"min": 8, "max": 8, "initial": 8}
    half = Workload(SAME.shapes, useful=0.5)
    plain, dropping = (look(0.01, workload=one, concurrency=slots).step_seconds for one in (SAME, half))
    assert dropping == pytest.approx(2 * plain, rel=0.35)


def test_processes_that_share_a_core_take_turns() -> None:
    async def both(cores: float | None) -> float:
        device = Device(cores)
        first, second = SimulatedTrainer(device), SimulatedEngine(engine(), device)
        await asyncio.gather(first.compute(1.0), second.generate(10, 10, 100))
        return asyncio.get_running_loop().time()

    assert run_virtually(both(2.0)) == pytest.approx(1.0, abs=1e-6)
    assert run_virtually(both(1.0)) == pytest.approx(2.0, abs=1e-6)


def test_an_engine_pays_for_prompts_sequences_and_room() -> None:
    async def batch(speed: LinearEngine, replies: int) -> float:
        served = SimulatedEngine(speed, Device())
        await asyncio.gather(*(served.generate(100, 100, 50) for _ in range(replies)))
        assert served.context == pytest.approx(0) and served.running == served.waiting == 0
        return asyncio.get_running_loop().time()

    assert run_virtually(batch(engine(), 4)) == pytest.approx(0.5, abs=1e-6)
    assert run_virtually(batch(engine(prefill_seconds=0.001), 4)) == pytest.approx(0.9, abs=1e-6)
    assert run_virtually(batch(engine(per_sequence=0.01), 4)) == pytest.approx(2.5, abs=1e-6)
    assert run_virtually(batch(engine(max_running=2), 4)) == pytest.approx(1.0, abs=1e-6)
    assert run_virtually(batch(engine(kv_tokens=300), 4)) == pytest.approx(1.0, abs=1e-6)


def test_a_cancelled_reply_leaves_its_room_to_others() -> None:
    async def cancelled() -> float:
        served = SimulatedEngine(engine(max_running=1), Device())
        long = asyncio.ensure_future(served.generate(10, 10, 10**6))
        short = asyncio.ensure_future(served.generate(10, 10, 100))
        await asyncio.sleep(1.0)
        long.cancel()
        await short
        return asyncio.get_running_loop().time()

    assert run_virtually(cancelled()) == pytest.approx(2.0, abs=1e-6)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    training=st.floats(0.05, 3.0),
    reply=st.integers(10, 300),
    max_lag=st.integers(0, 4),
    seconds=st.floats(0.0, 2.0),
)
def test_more_engines_and_faster_parts_are_never_slower(
    training: float, reply: int, max_lag: int, seconds: float
) -> None:
    workload = Workload([Shape.of(Turn(10, reply, seconds))])
    options = settings_of(max_lag=max_lag)
    slow = engine(per_sequence=0.002)

    def step(speed: LinearEngine, training: float, engines: int) -> float:
        return forecast(options, Speeds(speed, trainer(training)), workload, engines).step_seconds

    now = step(slow, training, 1)
    # A version that arrives a poll earlier or later may shift a batch, hence the slack.
    slack = POLL + 0.05 * now
    assert step(slow, training, 2) <= now + slack
    assert step(slow.times(0.5), training, 1) <= now + slack
    assert step(slow, training / 2, 1) <= now + slack
    assert now >= training - ROUNDING


def test_figures_have_their_means_and_fit_the_context() -> None:
    workload = Figures(20, 100, turns=2, reply_spread=0.5, turn_seconds=1.0, turn_spread=1.0).workload(4096, "given")
    assert workload.turns == 2 and workload.sampled == pytest.approx(200, rel=0.1)
    assert workload.seconds == pytest.approx(2.0, rel=0.25)
    short = Figures(20, 100, turns=9, reply_spread=1.0).workload(256, "given")
    assert all(sum(shape.samples) <= 256 for shape in short.shapes)


def test_what_the_host_computes_slows_those_that_share_its_cores() -> None:
    def seconds(cores: float, threads: float) -> float:
        async def body() -> float:
            device = Device(cores, threads)
            trainer, host = SimulatedTrainer(device), SimulatedHost(device)
            host.add(1.0)
            await trainer.compute(1.0)
            return asyncio.get_running_loop().time()

        return run_virtually(body())

    assert seconds(2.0, 1.0) == pytest.approx(1.0)
    assert seconds(1.0, 1.0) == pytest.approx(2.0)
    assert seconds(4.0, 4.0) == pytest.approx(1.25), "the host has one thread, the trainer four"
