"""The bundled environments by hand-made tables: what is said, what it is worth."""

import asyncio
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.base.errors import UsageError
from headway.core.episodes import Task, Trace
from headway.core.messages import Message, ToolCall
from headway.envs.base import Environment
from headway.envs.bundled import (
    ABOUT,
    ENVIRONMENTS,
    calculator,
    kuhn_poker,
    needle,
    proposer_solver,
    reverse_text,
    sort_words,
    wordle,
)
from headway.envs.bundled.problems import in_split
from headway.envs.policy import ScriptedPolicy
from headway.envs.registry import load_environment
from headway.envs.rewards import conversation, score

MODULES = (reverse_text, sort_words, calculator, wordle, kuhn_poker, proposer_solver, needle)


def play(environment: Environment, task: Task, answers: Iterable[str | Message]) -> list[Trace]:
    async def main() -> list[Trace]:
        policy = ScriptedPolicy(answers)
        state = await environment.run(task, policy)
        traces = [agent.trace for agent in policy.agents()]
        await score(environment.rewards(), task, traces, state)
        return traces

    return asyncio.run(main())


def said_to(trace: Trace) -> list[str]:
    return [message.content for message in conversation(trace) if message.role in ("user", "tool")]


@pytest.mark.parametrize(
    ("answer", "exact", "similarity"),
    [
        ("dcba", 1.0, 1.0),
        (" dcba\n", 1.0, 1.0),
        ("dcbb", 0.0, 0.75),
        ("abcd", 0.0, 0.0),
        ("dcbadcba", 0.0, 0.5),
        ("", 0.0, 0.0),
    ],
)
def test_reverse_text(answer: str, exact: float, similarity: float) -> None:
    (trace,) = play(reverse_text.ReverseText(), Task("t", {"word": "abcd"}), [answer])
    assert trace.rewards == {"exact": exact, "similarity": similarity}
    assert trace.reward == pytest.approx((exact + similarity) / 2)
    assert said_to(trace) == ["abcd"]


def test_reverse_text_weights_and_system_prompt() -> None:
    environment = reverse_text.ReverseText(exact=1.0, similarity=0.0, system="Reverse it.")
    (trace,) = play(environment, Task("t", {"word": "abcd"}), ["dcbb"])
    assert (trace.reward, trace.rewards, trace.metrics) == (0.0, {"exact": 0.0}, {"similarity": 0.75})
    assert conversation(trace)[0] == Message("system", "Reverse it.")


def test_reverse_text_demonstrations_are_of_the_quality_asked_for() -> None:
    rows = reverse_text.demonstrations(200, seed=3, copy_share=0.25)
    words = [[message["content"] for message in row["messages"]] for row in rows]
    assert sum(word == reply for word, reply in words) == 50
    assert all(reply in (word, word[::-1]) for word, reply in words)
    assert rows == reverse_text.demonstrations(200, seed=3, copy_share=0.25)
    held_out = {task.id for task in reverse_text.ReverseText(split="eval", num_tasks=2000).tasks()}
    assert not held_out & {word for word, _ in words}


@pytest.mark.parametrize(
    ("replies", "exact", "in_place"),
    [
        (["b d", "a b c d"], 1.0, 1.0),
        (["d b", "a b c d"], 0.5, 0.5),
        (["b d", "a c"], 0.5, (1.0 + 0.25) / 2),
        (["b d x", "a b d c"], 0.0, (2 / 3 + 0.5) / 2),
        (["", ""], 0.0, 0.0),
    ],
)
def test_sort_words(replies: list[str], exact: float, in_place: float) -> None:
    task = Task("t", {"rounds": [["d", "b"], ["c", "a"]]})
    (trace,) = play(sort_words.SortWords(), task, replies)
    assert trace.rewards == {"exact": exact, "in_place": pytest.approx(in_place)}
    assert said_to(trace) == ["d b", "c a"]


@pytest.mark.parametrize(
    ("answers", "correct", "calls", "results"),
    [
        (["42"], 1.0, 0, []),
        (["it is 41"], 0.0, 0, []),
        ([("calculate", '{"expression": "6 * 7"}'), "42"], 1.0, 1, ["42"]),
        ([("calculate", '{"expression": "6 / 7"}'), "42"], 1.0, 1, ["error: ValueError: not an arithmetic expression"]),
        ([("calculate", "{"), "?"], 0.0, 1, ["error: arguments are not JSON"]),
        ([("nothing", "{}"), "?"], 0.0, 1, ["error: there is no tool 'nothing'"]),
    ],
)
def test_calculator(answers: list[Any], correct: float, calls: int, results: list[str]) -> None:
    script = [a if isinstance(a, str) else Message("assistant", tool_calls=(ToolCall("c", *a),)) for a in answers]
    (trace,) = play(calculator.Calculator(), Task("t", {"expression": "6 * 7", "answer": 42}), script)
    assert (trace.rewards, trace.metrics) == ({"correct": correct}, {"tool_calls": calls})
    for told, wanted in zip(said_to(trace)[1:], results, strict=True):
        assert told.startswith(wanted)


@pytest.mark.parametrize(
    ("secret", "guess", "marks"),
    [
        ("abc", "abc", "GGG"),
        ("abc", "cab", "YYY"),
        ("abc", "def", "---"),
        ("aab", "aaa", "GG-"),
        ("abb", "baa", "YY-"),
        ("abca", "aaaa", "G--G"),
        ("aabb", "bbaa", "YYYY"),
        ("abcc", "ccxx", "YY--"),
        ("abcc", "cccx", "Y-G-"),
    ],
)
def test_wordle_feedback(secret: str, guess: str, marks: str) -> None:
    assert wordle.feedback(secret, guess) == marks


@given(st.text("abc", min_size=4, max_size=4), st.text("abc", min_size=4, max_size=4))
def test_wordle_feedback_never_promises_more_of_a_letter_than_there_is(secret: str, guess: str) -> None:
    marks = wordle.feedback(secret, guess)
    assert (marks == "GGGG") == (secret == guess)
    for letter in set(guess):
        named = sum(g == letter and m in "GY" for g, m in zip(guess, marks, strict=True))
        assert named == min(secret.count(letter), guess.count(letter))


@pytest.mark.parametrize(
    ("guesses", "reward", "told"),
    [
        (["abc"], 1.0, []),
        (["cba", "ABC "], 0.75, ["YGY"]),
        (["cba", "aaa", "abc"], 0.5, ["YGY", "G--"]),
        (["aba", "aaa", "ccc"], 0.2 * 2 / 3, ["GG-", "G--"]),
        (["abcd", "xyz", "the word is abc"], 0.0, ["not a guess", "not a guess"]),
    ],
)
def test_wordle(guesses: list[str], reward: float, told: list[str]) -> None:
    (trace,) = play(wordle.Wordle(alphabet="abcd", guesses=3), Task("t", {"secret": "abc"}), guesses)
    assert trace.reward == pytest.approx(reward)
    assert said_to(trace) == [wordle.START, *told]


@pytest.mark.parametrize("methodical", [False, True])
def test_wordle_demonstrations_never_contradict_what_they_were_told(methodical: bool) -> None:
    for row in wordle.demonstrations(50, seed=1, methodical=methodical):
        turns = [message["content"] for message in row["messages"][2:]]
        guesses, marks = turns[::2], turns[1::2]
        for told, (earlier, later) in zip(marks, pairwise(guesses), strict=True):
            assert wordle.feedback(later, earlier) == told


def test_sensible_kuhn_demonstrations_bet_on_the_king_and_never_on_the_jack() -> None:
    for row in kuhn_poker.demonstrations(200, seed=2, sensible_share=1.0, system=None):
        told = row["messages"][0]["content"]
        said = {message["content"] for message in row["messages"] if message["role"] == "assistant"}
        if "you hold K" in told:
            assert said <= {"bet", "call"}
        if "you hold J" in told:
            assert said <= {"check", "fold"}


def test_methodical_wordle_demonstrations_are_decided_by_what_they_were_told() -> None:
    played: dict[str, set[str]] = {}
    for row in wordle.demonstrations(200, seed=1, methodical=True, system=None):
        turns = [message["content"] for message in row["messages"]]
        for guess in range(1, len(turns), 2):
            played.setdefault(" ".join(turns[:guess]), set()).add(turns[guess])
    assert all(len(guesses) == 1 for guesses in played.values())


def test_careless_wordle_demonstrations_take_more_guesses() -> None:
    careful, half, careless = (
        sum(len(row["messages"]) for row in wordle.demonstrations(200, seed=1, careless_share=share))
        for share in (0.0, 0.5, 1.0)
    )
    assert careful < half < careless


def test_sort_words_demonstrations_are_of_the_quality_asked_for() -> None:
    copied = 0
    for row in sort_words.demonstrations(200, seed=3, copy_share=0.25, system=None):
        first, reply, second, last = [message["content"].split() for message in row["messages"]]
        copied += last == first + second
        assert (reply, last) in [(first, first + second), (sorted(first), sorted(first + second))]
    assert 50 <= copied < 60  # a few come sorted already


@pytest.mark.parametrize(
    ("cards", "replies", "first"),
    [
        ("KQ", ["check", "check"], 1),
        ("JQ", ["check", "check"], -1),
        ("JK", ["bet", "fold"], 1),
        ("KJ", ["bet", "call"], 2),
        ("JK", ["bet", "call"], -2),
        ("KQ", ["check", "bet", "fold"], -1),
        ("KQ", ["check", "bet", "I think I call"], 2),
        ("QK", ["Check.", "BET!", "Call"], -2),
        ("KQ", ["call"], -2),
        ("KQ", ["check", "fold"], 2),
        ("KQ", ["bet", ""], 2),
        ("KQ", ["check", "bet", "check"], -2),
    ],
)
def test_kuhn_poker(cards: str, replies: list[str], first: int) -> None:
    traces = play(kuhn_poker.KuhnPoker(), Task("t", {"cards": list(cards)}), replies)
    scores = {trace.agent: trace.reward for trace in traces}
    assert scores == {"first": first, "second": -first}


def test_kuhn_poker_tells_each_seat_its_own_card_only() -> None:
    traces = play(kuhn_poker.KuhnPoker(system=None), Task("t", {"cards": ["J", "K"]}), ["check", "bet", "fold"])
    told = {trace.agent: said_to(trace) for trace in traces}
    assert told == {
        "first": ["you hold J\ncheck or bet?", "opponent: bet\ncall or fold?"],
        "second": ["you hold K\nopponent: check\ncheck or bet?"],
    }


def test_a_hand_refuses_illegal_actions_and_early_payoffs() -> None:
    hand = kuhn_poker.Hand(("J", "Q"))
    with pytest.raises(ValueError, match="call is not one of check, bet"):
        hand.act("call")
    with pytest.raises(ValueError, match="not over"):
        hand.payoff()


@pytest.mark.parametrize(
    ("answers", "proposer", "solvers"),
    [
        (["3 + 4", "7", "7", "7", "7"], 0.1, [1, 1, 1, 1]),
        (["3 + 4", "7", "8", "7", "8"], 1.1, [1, 0, 1, 0]),
        (["so:\n3+4", "7", "8", "8", "8"], 0.1 + 0.75, [1, 0, 0, 0]),
        (["3 + 4 + 5"], 0.0, []),
        (["3 * 4"], 0.0, []),
        (["30 + 4"], 0.0, []),
        (["what?"], 0.0, []),
        ([""], 0.0, []),
    ],
)
def test_proposer_solver(answers: list[str], proposer: float, solvers: list[int]) -> None:
    task = Task("t", {"terms": 2, "operators": "+", "largest": 20})
    first, *others = play(proposer_solver.ProposerSolver(solvers=4), task, answers)
    assert (first.agent, first.problem) == ("proposer", None)
    assert first.reward == pytest.approx(proposer)
    assert [trace.reward for trace in others] == solvers
    assert {trace.problem for trace in others} <= {"3 + 4"}


def test_needle_asks_for_one_of_the_facts_in_a_text_of_the_asked_length() -> None:
    for seed in range(20):
        text, code, depth = needle.haystack(seed, 1500, 4)
        body, question = text.split("\n\n")
        assert 1500 <= len(body) <= 1500 + 5 * 60
        assert body.count("The code of the") == 4
        fact = question.replace("What is", "The").replace("The the", "The").rstrip("?") + f" is {code}."
        assert body.index(fact) / len(body) == depth
    (trace,) = play(needle.Needle(length=100), Task("t", {"seed": 5}), [f"It is {needle.haystack(5, 100, 3)[1]}."])
    assert trace.reward == 1.0


NEED_NOTHING = [name for name, path in ENVIRONMENTS.items() if ".bundled." in path and name != "image-questions"]
"""Its tasks are a user's own, and have tests of their own."""


@pytest.mark.parametrize("name", NEED_NOTHING)
def test_tasks_are_the_same_every_time_with_distinct_ids(name: str) -> None:
    first, second = load_environment(name).tasks(), load_environment(name).tasks()
    assert list(first) == list(second)
    assert len({task.id for task in first}) == len(first) > 0


@pytest.mark.parametrize("name", ["reverse-text", "sort-words", "calculator", "wordle", "needle"])
def test_train_and_eval_tasks_are_disjoint(name: str) -> None:
    train = {task.id for task in load_environment(name, {"seed": 1}).tasks()}
    held_out = {task.id for task in load_environment(name, {"seed": 1, "split": "eval"} | few(name)).tasks()}
    assert held_out and not train & held_out


def few(name: str) -> dict[str, int]:
    return {} if name == "wordle" else {"num_tasks": 64}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_demonstrations_end_with_the_assistant_and_repeat_with_their_seed(module: Any) -> None:
    rows = module.demonstrations(20, seed=4)
    assert len(rows) == 20
    assert rows == module.demonstrations(20, seed=4) != module.demonstrations(20, seed=5)
    for row in rows:
        messages = [Message.from_openai(message) for message in row["messages"]]
        assert messages[-1].role == "assistant"
        assert any(message.role == "user" for message in messages)


def test_calculator_demonstrations_call_the_tool_as_the_environment_would_run_it() -> None:
    rows = calculator.demonstrations(40, seed=0, guess_share=0.25)
    called = [row for row in rows if len(row["messages"]) > 3]
    assert len(called) == 30
    for row in called:
        _, question, call, result, answer = [Message.from_openai(message) for message in row["messages"]]
        expression = question.content.removesuffix(" = ?")
        assert call.tool_calls[0].arguments == f'{{"expression": "{expression}"}}'
        assert result.content == answer.content == calculator.Calculator(num_tasks=1).calculate(expression)
        assert in_split(expression, "train")
        assert row["tools"][0]["function"]["name"] == "calculate"


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("reverse-text", {"min_len": 5, "max_len": 4}),
        ("reverse-text", {"num_tasks": 1000, "min_len": 1, "max_len": 1}),
        ("sort-words", {"rounds": 0}),
        ("calculator", {"operators": "/"}),
        ("wordle", {"words": []}),
        ("wordle", {"words": ["ab", "abc"]}),
        ("wordle", {"length": 30}),
        ("wordle", {"guesses": 1}),
        ("proposer-solver", {"solvers": 1}),
        ("needle", {"facts": 0}),
    ],
)
def test_arguments_that_make_no_sense_are_refused(name: str, args: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        load_environment(name, args)


def test_every_environment_says_what_it_is_about() -> None:
    assert list(ABOUT) == list(ENVIRONMENTS)
