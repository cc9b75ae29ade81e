"""When a dead process is started again, and when the run gives up."""

from headway.launch.process import RestartBudget


def test_delays_double_up_to_the_longest() -> None:
    budget = RestartBudget(limit=6, first_delay=1.0, longest_delay=5.0)
    assert [budget.died(0.0, progress=-1) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_gives_up_after_the_limit() -> None:
    budget = RestartBudget(limit=2)
    assert budget.died(0.0, progress=-1) is not None
    assert budget.died(0.0, progress=-1) is not None
    assert budget.died(0.0, progress=-1) is None


def test_progress_or_a_long_life_forgives_earlier_deaths() -> None:
    budget = RestartBudget(limit=2, first_delay=1.0)
    budget.died(0.0, progress=3)
    budget.died(0.0, progress=3)
    assert budget.died(0.0, progress=4) == 1.0
    budget.died(0.0, progress=4)
    assert budget.died(61.0, progress=4) == 1.0


def test_replayed_steps_are_not_progress() -> None:
    """A trainer that dies at the same step again and again falls back to its checkpoint in between."""
    budget = RestartBudget(limit=2)
    for progress in (20, 17):
        assert budget.died(0.0, progress) is not None
    assert budget.died(0.0, 20) is None
