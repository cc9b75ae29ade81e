"""Advantages of every reward-based algorithm, against tables computed by hand."""

import pytest
from handmade_groups import advantages_of, make_group, make_trace

from headway.algorithms.base import Algorithm, penalized_rewards
from headway.algorithms.rae import Rae
from headway.algorithms.registry import make_algorithm
from headway.config import algorithms as settings_of
from headway.config.algorithms import LengthPenalty, is_group_relative

TABLE: list[tuple[Algorithm, list[float], list[float]]] = [
    # mean 0.5
    (make_algorithm(settings_of.Grpo()), [1.0, 0.0, 0.5, 0.5], [0.5, -0.5, 0.0, 0.0]),
    # mean 0.5, variance (0.25 + 0.25 + 0.25 + 0.25) / 4 = 0.25, deviation 0.5
    (make_algorithm(settings_of.Grpo(normalize="std")), [1.0, 0.0, 1.0, 0.0], [1.0, -1.0, 1.0, -1.0]),
    # deviation sqrt((4 + 1 + 1 + 4) / 4) = sqrt(2.5)
    (
        make_algorithm(settings_of.Grpo(normalize="std")),
        [2.0, 1.0, -1.0, -2.0],
        [1.264911, 0.632456, -0.632456, -1.264911],
    ),
    (make_algorithm(settings_of.Grpo(normalize="std")), [0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
    # mean 0.25: (1 - 0.25) / 0.25 = 3, (0 - 0.25) / 0.25 = -1
    (make_algorithm(settings_of.MaxRl()), [1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
    (make_algorithm(settings_of.MaxRl()), [0.0, 0.0], [0.0, 0.0]),
    (make_algorithm(settings_of.MaxRl()), [-1.0, 0.5], [0.0, 0.0]),
    # others of the first: (0 + 2) / 2 = 1; of the second: (1 + 2) / 2 = 1.5; of the third: (1 + 0) / 2 = 0.5
    (make_algorithm(settings_of.Rloo()), [1.0, 0.0, 2.0], [0.0, -1.5, 1.5]),
    (make_algorithm(settings_of.Rloo()), [3.0], [0.0]),
]


@pytest.mark.parametrize(("algorithm", "rewards", "expected"), TABLE)
def test_table(algorithm: Algorithm, rewards: list[float], expected: list[float]) -> None:
    group = make_group(*(make_trace(reward) for reward in rewards))
    algorithm.score(group)
    assert advantages_of(group) == pytest.approx(expected, abs=1e-6)


def test_agents_are_compared_with_their_own_kind() -> None:
    pairs = [(make_trace(white, agent="white"), make_trace(black, agent="black")) for white, black in ((1, 4), (0, 2))]
    group = make_group(*pairs)
    make_algorithm(settings_of.Grpo()).score(group)
    assert advantages_of(group) == [0.5, 1.0, -0.5, -1.0]


def test_hierarchical_grpo_compares_solvers_on_the_same_problem_and_proposers_with_each_other() -> None:
    group = make_group(
        [
            make_trace(0.8, agent="proposer"),
            make_trace(1.0, agent="solver", problem="p0"),
            make_trace(0.0, agent="solver", problem="p0"),
        ],
        [
            make_trace(0.2, agent="proposer"),
            make_trace(0.5, agent="solver", problem="p1"),
            make_trace(0.1, agent="solver", problem="p1"),
        ],
    )
    make_algorithm(settings_of.HierarchicalGrpo()).score(group)
    # proposers: mean 0.5; solvers of p0: mean 0.5; of p1: mean 0.3
    assert advantages_of(group) == pytest.approx([0.3, 0.5, -0.5, -0.3, 0.2, -0.2])


def test_reinforce_pp_normalizes_over_the_batch() -> None:
    algorithm = make_algorithm(settings_of.ReinforcePp())
    easy, hard = make_group(make_trace(1.0), make_trace(0.0)), make_group(make_trace(4.0), make_trace(0.0))
    for group in (easy, hard):
        algorithm.score(group)
    assert advantages_of(easy) == [0.5, -0.5] and advantages_of(hard) == [2.0, -2.0]
    algorithm.finish_batch([easy, hard])
    # mean 0, deviation sqrt((0.25 + 0.25 + 4 + 4) / 4) = sqrt(2.125) = 1.457738
    assert advantages_of(easy) == pytest.approx([0.342997, -0.342997], abs=1e-6)
    assert advantages_of(hard) == pytest.approx([1.371989, -1.371989], abs=1e-6)


def test_rae_measures_each_agent_before_its_average_moves() -> None:
    algorithm = Rae(decay=0.9)
    group = make_group(
        [make_trace(1.0, agent="a"), make_trace(-1.0, agent="b")],
        [make_trace(1.0, agent="a"), make_trace(1.0, agent="b")],
    )
    algorithm.score(group)
    # a: 1 - 0 = 1, average 0.1; then 1 - 0.1 = 0.9, average 0.19. b: -1 - 0, average -0.1; then 1 + 0.1, average 0.01
    assert advantages_of(group) == pytest.approx([1.0, -1.0, 0.9, 1.1])
    assert algorithm.averages == pytest.approx({"a": 0.19, "b": 0.01})


def test_rae_goes_on_from_its_saved_averages() -> None:
    first = make_algorithm(settings_of.Rae())
    first.score(make_group(make_trace(1.0)))
    second = make_algorithm(settings_of.Rae())
    second.load(first.save())
    group = make_group(make_trace(1.0))
    second.score(group)
    assert advantages_of(group) == pytest.approx([0.95])


def test_length_penalty_by_hand() -> None:
    traces = [make_trace(1.0, prompt=2, reply=4, turns=1), make_trace(0.5, prompt=2, reply=4, turns=2)]
    # mean 0.75; the second is the largest in all three: 0.25 + 0.1 + 0.1; the first has half of each
    got = penalized_rewards(traces, LengthPenalty())
    assert got == pytest.approx([1.0 - 0.75 * 0.225, 0.5 - 0.75 * 0.45])
    assert penalized_rewards(traces, None) == [1.0, 0.5]


def test_length_penalty_reaches_the_advantages() -> None:
    group = make_group(make_trace(1.0, reply=2), make_trace(1.0, reply=4))
    make_algorithm(settings_of.Grpo(length_penalty=LengthPenalty(output=0.5, input=0.0, turns=0.0))).score(group)
    # rewards 1 - 0.25 and 1 - 0.5, mean 0.625
    assert advantages_of(group) == pytest.approx([0.125, -0.125])


def test_which_algorithms_need_a_group() -> None:
    compared: list[settings_of.Algorithm] = [
        settings_of.Grpo(), settings_of.MaxRl(), settings_of.Rloo(), settings_of.ReinforcePp(), settings_of.Echo(),
        settings_of.HierarchicalGrpo(),
    ]  # fmt: skip
    assert all(make_algorithm(settings).relative and is_group_relative(settings) for settings in compared)
    assert not make_algorithm(settings_of.Rae()).relative and not is_group_relative(settings_of.Rae())
