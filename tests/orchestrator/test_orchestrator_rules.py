"""The orchestrator's pure rules, as tables: staleness, concurrency, mixing, curricula, rate, group accounting."""

import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.base.errors import UsageError
from headway.config import orchestrator as settings_of
from headway.config.orchestrator import ConcurrencySettings, EvalSettings
from headway.core.episodes import Episode, EpisodeError, ErrorKind, Task
from headway.orchestrator.dispatch.admission import Admission
from headway.orchestrator.evaluation import evaluation_due
from headway.orchestrator.groups import curriculum as curricula
from headway.orchestrator.groups.concurrency import Control, Load, start, steer
from headway.orchestrator.groups.curriculum import Curriculum, InOrder
from headway.orchestrator.groups.loss_budget import LossBudget
from headway.orchestrator.groups.open_group import RETRIES, OpenGroup
from headway.orchestrator.groups.sources import Mix, RateLimit
from headway.orchestrator.groups.staleness import (
    SPARE,
    StalenessLimits,
    lag,
    may_open_group,
    may_send,
    next_pace,
    too_old,
    usable_batches,
)
from headway.orchestrator.scores import pass_at_k


def limits(max_lag: int = 8, run_ahead: int = 1, max_steps: int = 100) -> StalenessLimits:
    return StalenessLimits(batch_size=8, max_lag=max_lag, run_ahead=run_ahead, max_steps=max_steps)


def test_lag_counts_versions_behind_what_the_batch_trains() -> None:
    assert [lag(5, version) for version in (4, 3, 0, 2**31 - 1)] == [0, 1, 4, 0]
    assert too_old(5, 1, 2) and not too_old(5, 2, 2)


@pytest.mark.parametrize(
    ("step", "newest", "run_ahead", "allowed"),
    [(1, 0, 0, True), (2, 0, 0, False), (2, 0, 1, True), (3, 0, 1, False), (3, 1, 1, True), (1, -1, 0, False)],
)
def test_batches_run_ahead_of_the_trainer_by_so_many(step: int, newest: int, run_ahead: int, allowed: bool) -> None:
    assert may_send(step, newest, limits(run_ahead=run_ahead)) is allowed


def test_on_policy_work_waits_for_the_version_it_is_to_train() -> None:
    rules = limits(max_lag=0)
    assert may_open_group(1, 0, 0, 0, 9.0, rules)
    assert not may_open_group(2, 0, 0, 0, 9.0, rules), "batch 2 trains version 1, which isn't there yet"
    assert may_open_group(2, 1, 0, 0, 9.0, rules)
    assert not may_open_group(2, 1, 0, 8, 9.0, rules), "one batch is on its way, and a second could not be used"


def test_nothing_is_started_that_no_batch_can_use() -> None:
    assert usable_batches(1, 0, limits(max_lag=3)) == 4
    assert usable_batches(3, 0, limits(max_lag=3)) == 2
    assert usable_batches(99, 98, limits()) == 2, "the run ends after step 100"
    most = 8 * (9 - SPARE)
    assert may_open_group(1, 0, 7, most - 7.1, 9.0, limits())
    assert not may_open_group(1, 0, 7, most - 7, 9.0, limits())
    assert may_open_group(1, 0, 0, 7.9, 9.0, limits(max_lag=0)), "the only batch that can use it must be full"


@pytest.mark.parametrize(("ready", "newest", "wanted"), [(7, -1, True), (8, -1, False), (8, 0, True)])
def test_a_full_batch_that_waits_for_the_trainer_stops_new_work(ready: int, newest: int, wanted: bool) -> None:
    """But not one that the trainer wants and that waits for slow episodes."""
    nothing_coming = SimpleNamespace(outstanding=0, useful_share=1.0)
    admission = Admission(
        limits=limits(),
        fleet=cast(Any, None),
        updater=cast(Any, SimpleNamespace(newest_version=newest)),
        ready=cast(Any, SimpleNamespace(episodes=ready)),
        collector=cast(Any, nothing_coming),
        frozen=False,
        pace=2.0,
        step=2,
    )
    assert admission.wants(1, outstanding=0) is wanted


@given(st.floats(0, 0.5), st.lists(st.integers(0, 20), max_size=200))
def test_no_more_is_given_up_than_the_budget_has(share: float, wishes: list[int]) -> None:
    """Between one wish to give episodes up and the next, four end by themselves."""
    budget, ended, lost = LossBudget(share, batch_size=64), 0, 0
    for wish in wishes:
        for _ in range(4):
            budget.earn()
        ended += 4
        if budget.allows(wish):
            budget.spend(wish)
            lost += wish
    assert lost <= share * (ended + lost) + 1e-6


def test_a_budget_is_saved_up_for_two_batches_at_most() -> None:
    budget = LossBudget(0.1, batch_size=50)
    for _ in range(10_000):
        budget.earn()
    assert budget.allows(10) and not budget.allows(11)
    budget.spend(15)
    assert budget.allows(0) and not budget.allows(1)


def test_no_more_is_under_way_than_keeps_the_trainer_busy() -> None:
    assert may_open_group(1, 0, 7, 8.0, 2.0, limits()) and not may_open_group(1, 0, 7, 9.0, 2.0, limits())
    assert next_pace(2.0, trainer_starved=True, waited_share=0.0, limits=limits()) == pytest.approx(3.0)
    assert next_pace(8.0, trainer_starved=True, waited_share=0.0, limits=limits()) == 9.0, "no more than can be used"
    assert next_pace(2.0, trainer_starved=False, waited_share=0.8, limits=limits()) == pytest.approx(1.94)
    assert next_pace(1.0, trainer_starved=False, waited_share=1.0, limits=limits()) == 1.0, "always a batch"
    assert next_pace(2.0, trainer_starved=False, waited_share=0.3, limits=limits()) == 2.0


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 8), st.integers(0, 3))
def test_what_may_be_opened_is_not_too_old_for_the_next_batch(
    step: int, version: int, max_lag: int, ahead: int
) -> None:
    rules = limits(max_lag, ahead)
    if may_open_group(step, version, 0, 0, 9.0, rules):
        assert not too_old(step, version, max_lag)


SETTINGS = ConcurrencySettings(min=4, max=100, initial=20, kv_low=0.7, kv_high=0.9)


def load(in_flight: int = 20, finished: int = 20, waiting: int = 0, kv: float = 0.3, preemptions: int = 0) -> Load:
    return Load(in_flight, finished, running=20, waiting=waiting, kv_usage=kv, preemptions=preemptions)


BEFORE = Control(cap=20, least=4, last=load(finished=0))


@pytest.mark.parametrize(
    ("now", "cap", "admit", "cancel"),
    [
        (load(), 26, True, 0),  # a turnover, low usage, cap in use: 20 * 1.25 + 1
        (load(finished=19), 20, True, 0),  # not yet a turnover
        (load(in_flight=10), 20, True, 0),  # the cap isn't what holds it back
        (load(kv=0.8), 20, True, 0),  # between low and high: keep
        (load(kv=0.92), 20, False, 0),  # near the ceiling: stop admitting
        (load(kv=0.96), 20, False, 2),  # beyond it and still climbing: cancel a tenth
        (load(preemptions=1), 15, True, 0),  # preempted: cut, at once
        (load(preemptions=1, finished=1), 15, True, 0),
        (load(waiting=6), 15, True, 0),  # a queue that grows beyond a quarter of what runs
        (load(waiting=6, finished=1), 20, True, 0),  # but only once per turnover
        (load(waiting=5), 26, True, 0),
    ],
)
def test_concurrency(now: Load, cap: int, admit: bool, cancel: int) -> None:
    after = steer(BEFORE, now, SETTINGS)
    assert (after.cap, after.admit, after.cancel) == (cap, admit, cancel)


def test_concurrency_stops_cancelling_when_usage_falls() -> None:
    climbing = steer(BEFORE, load(kv=0.99), SETTINGS)
    assert climbing.cancel == 2
    assert steer(climbing, load(kv=0.97), SETTINGS).cancel == 0


def test_concurrency_starts_within_bounds() -> None:
    assert start(ConcurrencySettings(min=30, max=40, initial=5)).cap == 30
    assert start(ConcurrencySettings(min=1, max=4, initial=50)).cap == 4


LOADS = st.builds(
    Load,
    in_flight=st.integers(0, 200),
    finished=st.integers(0, 10_000),
    running=st.integers(0, 200),
    waiting=st.integers(0, 200),
    kv_usage=st.floats(0, 1),
    preemptions=st.integers(0, 5),
)


@given(st.lists(LOADS, max_size=30))
def test_concurrency_never_leaves_its_bounds(loads: list[Load]) -> None:
    control = start(SETTINGS)
    for now in loads:
        control = steer(control, now, SETTINGS)
        assert SETTINGS.min <= control.cap <= SETTINGS.max
        assert control.admit == (now.kv_usage < SETTINGS.kv_high)
        assert control.limit == (control.cap if control.admit else SETTINGS.min), "a few always may fly"


def test_environments_are_mixed_by_ratio() -> None:
    mix = Mix({"a": 3.0, "b": 1.0})
    order = []
    for _ in range(400):
        name = mix.pick(["a", "b"])
        assert name is not None
        mix.took(name, 4)
        order.append(name)
    assert order.count("a") == 300 and all(order[i : i + 8].count("b") == 2 for i in range(0, 400, 8))
    assert mix.pick(["b"]) == "b" and mix.pick([]) is None


def test_an_environment_that_is_new_does_not_catch_up() -> None:
    mix = Mix({"old": 1.0, "new": 1.0})
    mix.load({"old": 1000, "gone": 5})
    assert mix.counts == {"old": 1000, "new": 1000}


def make_curriculum(settings: settings_of.Curriculum, tasks: int, seed: int) -> Curriculum:
    return curricula.make_curriculum(settings, [Task(f"task {i}", {"size": i}) for i in range(tasks)], seed)


def drawn(curriculum: Curriculum, count: int) -> list[int]:
    return [curriculum.next() for _ in range(count)]


def test_tasks_in_order_and_shuffled() -> None:
    assert drawn(make_curriculum(settings_of.InOrder(), 3, 0), 7) == [0, 1, 2, 0, 1, 2, 0]
    shuffled = make_curriculum(settings_of.Shuffled(), 50, 1)
    first, second = drawn(shuffled, 50), drawn(shuffled, 50)
    assert sorted(first) == sorted(second) == list(range(50)) and first != second
    assert first == drawn(make_curriculum(settings_of.Shuffled(), 50, 1), 50)
    assert first != drawn(make_curriculum(settings_of.Shuffled(), 50, 2), 50)


KINDS = [settings_of.InOrder(), settings_of.Shuffled(), settings_of.DifficultyPools()]


@pytest.mark.parametrize("settings", KINDS, ids=lambda s: s.type)
def test_a_curriculum_goes_on_where_it_was_saved(settings: settings_of.Curriculum) -> None:
    one = make_curriculum(settings, 7, 3)
    for index in drawn(one, 10):
        one.report(index, index / 6)
    saved = json.loads(json.dumps(one.save()))
    other = make_curriculum(settings, 7, 3)
    other.load(saved)
    assert drawn(one, 20) == drawn(other, 20)


def test_difficulty_draws_mostly_what_is_neither_easy_nor_hard() -> None:
    curriculum = make_curriculum(settings_of.DifficultyPools(), 300, 0)
    for index in range(300):
        curriculum.report(index, (0.0, 0.5, 1.0)[index % 3])
    counts = [0, 0, 0]
    for index in drawn(curriculum, 2000):
        counts[index % 3] += 1
    hard, medium, easy = (count / 2000 for count in counts)
    assert hard == pytest.approx(0.2, abs=0.04) and medium == pytest.approx(0.7, abs=0.04)
    assert easy == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("settings", KINDS, ids=lambda s: s.type)
@pytest.mark.parametrize("tasks", [4, 12])
def test_a_curriculum_goes_on_with_another_number_of_tasks(settings: settings_of.Curriculum, tasks: int) -> None:
    one = make_curriculum(settings, 7, 3)
    for index in drawn(one, 10):
        one.report(index, index / 6)
    other = make_curriculum(settings, tasks, 3)
    other.load(one.save())
    assert set(drawn(other, 40 * tasks)) == set(range(tasks))


class Backwards(InOrder):
    """A curriculum of one's own."""

    def __init__(self, tasks: int, seed: int, step: int) -> None:
        super().__init__(tasks)
        self.place, self.tasks, self.step = 0, tasks, step

    def next(self) -> int:
        self.place -= self.step
        return self.place % self.tasks


def test_a_curriculum_of_ones_own() -> None:
    path = f"{__name__}:Backwards"
    made = make_curriculum(settings_of.CustomCurriculum(path=path, args={"step": 2}), 10, 0)
    assert drawn(made, 3) == [8, 6, 4]
    with pytest.raises(UsageError, match="could not be imported"):
        make_curriculum(settings_of.CustomCurriculum(path="no.such.module:Thing"), 10, 0)


def largest_first(tasks: Sequence[Task], seed: int, most: int) -> Iterator[int]:
    """A sampler of one's own."""
    order = sorted(range(len(tasks)), key=lambda index: -tasks[index].data["size"])[:most]
    while True:
        yield from order


def test_a_sampler_of_ones_own_goes_on_where_it_was_saved() -> None:
    settings = settings_of.CustomSampler(path=f"{__file__}:largest_first", args={"most": 3})
    made = make_curriculum(settings, 10, 0)
    assert drawn(made, 4) == [9, 8, 7, 9]
    other = make_curriculum(settings, 10, 0)
    other.load(json.loads(json.dumps(made.save())))
    assert drawn(other, 2) == [8, 7]
    with pytest.raises(UsageError, match="most"):
        make_curriculum(settings_of.CustomSampler(path=f"{__file__}:largest_first"), 10, 0)


def test_rate_limits_space_starts_evenly() -> None:
    rate = RateLimit(4.0)
    assert rate.wait(100.0) == 0.0
    rate.took(100.0)
    assert rate.wait(100.1) == pytest.approx(0.15)
    rate.took(100.25)
    assert rate.wait(100.25) == pytest.approx(0.25)
    assert RateLimit(None).wait(0.0) == 0.0


def episode(episode_id: str, error: ErrorKind | None = None) -> Episode:
    return Episode(episode_id, "g", "env", Task("t"), error=EpisodeError(error, "") if error else None)


def test_a_group_retries_failures_and_settles_with_what_it_has() -> None:
    group = OpenGroup("g", "env", Task("t"), 0, version=3, size=3)
    first, second, third = group.start(), group.start(), group.start()
    assert not group.waiting
    group.on_finished(episode(first))
    group.on_finished(episode(second, "context"))
    for attempt in range(RETRIES):
        group.on_finished(episode(third, "worker"))
        assert not group.settled and len(group.waiting) == 1, attempt
        third = group.start()
    group.on_finished(episode(third, "worker"))
    assert group.settled and len(group.finished) == 1 and len(group.failed) == 2
    assert group.usable(1) and not group.usable(2)
    with pytest.raises(KeyError):
        group.on_finished(episode(first))


def test_a_cancelled_group_starts_nothing_more_and_is_never_used() -> None:
    group = OpenGroup("g", "env", Task("t"), 0, version=3, size=3)
    in_flight = [group.start(), group.start()]
    group.cancel()
    assert not group.waiting and not group.settled
    group.on_finished(episode(in_flight[0]))
    group.on_finished(episode(in_flight[1], "worker"))
    assert group.settled and not group.usable(1)


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 0, 2) == 0.0
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)  # of 6 pairs, one has no solution
    assert pass_at_k(4, 3, 2) == 1.0


@pytest.mark.parametrize(
    ("version", "evaluated", "due"),
    [
        (4, 0, False),
        (5, 0, True),
        (6, 0, True),
        (6, 5, False),
        (9, 5, False),
        (10, 6, True),
        (3, 5, False),
        (20, 15, False),
    ],
)
def test_evaluations_come_at_intervals_also_when_versions_are_skipped(version: int, evaluated: int, due: bool) -> None:
    assert evaluation_due(version, evaluated, EvalSettings(interval=5), max_steps=20) is due
    assert not evaluation_due(version, evaluated, EvalSettings(), max_steps=20)
