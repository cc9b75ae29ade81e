"""Problems come from seeds, and the splits never meet."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.base.errors import UsageError
from headway.envs.bundled.arithmetic import evaluate, last_number, random_expression
from headway.envs.bundled.problems import distinct, in_split, random_word


def words(count: int, split: str, seed: int) -> list[str]:
    return distinct(lambda rng: random_word(rng, 3, 5), lambda word: word, count, split=split, seed=seed)  # type: ignore[arg-type]


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_train_and_eval_problems_never_meet_whatever_the_seeds(train_seed: int, eval_seed: int) -> None:
    assert not set(words(30, "train", train_seed)) & set(words(30, "eval", eval_seed))


def test_the_same_seed_gives_the_same_problems() -> None:
    assert words(50, "train", 7) == words(50, "train", 7)
    assert words(50, "train", 7) != words(50, "train", 8)


def test_problems_are_distinct_and_asking_for_too_many_is_refused() -> None:
    assert len(set(words(500, "train", 0))) == 500
    with pytest.raises(UsageError, match="lower num_tasks"):
        distinct(lambda rng: rng.choice("abc"), str, 10, split="train", seed=0)
    with pytest.raises(UsageError, match='"train" or "eval"'):
        words(1, "test", 0)


@given(st.text())
def test_every_problem_is_in_exactly_one_split(key: str) -> None:
    assert in_split(key, "train") != in_split(key, "eval")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2", 3),
        (" 7*6 ", 42),
        ("2 + 3 * 4", 14),
        ("(2 + 3) * 4", 20),
        ("-5 + 3", -2),
        ("17 // 5", 3),
        ("17 % 5", 2),
        ("10 - -4", 14),
    ],
)
def test_arithmetic_table(expression: str, value: int) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "not an arithmetic"),
        ("1 +", "not an arithmetic"),
        ("2 ** 9", "not an arithmetic"),
        ("1.5 + 1", "not an arithmetic"),
        ("True + 1", "not an arithmetic"),
        ("__import__('os')", "not an arithmetic"),
        ("a + 1", "not an arithmetic"),
        ("1 // 0", "division by zero"),
        ("999999999 * 999999999", "too large"),
        ("1" * 201, "too long"),
        ("(" * 190, "not an arithmetic"),
        ("\x00", "not an arithmetic"),
    ],
)
def test_what_is_not_arithmetic_is_refused_with_a_sentence(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        evaluate(expression)


@given(st.integers(0, 1000), st.integers(2, 5))
def test_random_expressions_evaluate(seed: int, terms: int) -> None:
    expression = random_expression(random.Random(seed), terms, 20, "+-*")
    assert isinstance(evaluate(expression), int)
    assert len(expression.split()) == 2 * terms - 1


@pytest.mark.parametrize(
    ("text", "number"), [("the answer is 12.", 12), ("3 + 4 = 7", 7), ("-8", -8), ("none", None), ("", None)]
)
def test_the_last_number_is_the_answer(text: str, number: int | None) -> None:
    assert last_number(text) == number
