"""Sort words, then sort again as more arrive: the model has to remember what it was given before."""

import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.core.messages import Message
from headway.envs.base import MultiTurn, State, reward
from headway.envs.bundled.problems import Row, Split, demonstration, distinct, opening, positional_share, random_word

SYSTEM = "Sort all words given so far, this time's and earlier ones, alphabetically. Reply with the words only."


class SortWords(MultiTurn):
    """In each of `rounds` turns the user sends `words` new words of `word_len` letters.

    Each reply should hold every word so far in alphabetical order. Rewards are means over the turns.
    """

    def __init__(
        self,
        *,
        num_tasks: int = 512,
        rounds: int = 2,
        words: int = 3,
        word_len: int = 3,
        split: Split = "train",
        seed: int = 0,
        system: str | None = SYSTEM,
    ) -> None:
        if min(rounds, words, word_len) < 1:
            raise UsageError("sort-words: rounds, words and word_len must be at least 1")

        def make(rng: random.Random) -> list[list[str]]:
            return [[random_word(rng, word_len, word_len) for _ in range(words)] for _ in range(rounds)]

        self._tasks = distinct(make, str, num_tasks, split=split, seed=seed)
        self._system = system
        self.max_turns = rounds

    def tasks(self) -> Sequence[Task]:
        return [Task(" / ".join(map(" ".join, rounds)), {"rounds": rounds}) for rounds in self._tasks]

    def prompt(self, task: Task) -> list[Message]:
        return opening(self._system, " ".join(task.data["rounds"][0]))

    def respond(self, state: State, reply: Message) -> str | None:
        rounds = state.task.data["rounds"]
        return " ".join(rounds[state.turn]) if state.turn < len(rounds) else None

    @reward(weight=0.5)
    def exact(self, task: Task, state: State) -> float:
        return fmean(float(said == wanted) for said, wanted in _turns(task, state))

    @reward(weight=0.5)
    def in_place(self, task: Task, state: State) -> float:
        """The share of words at their place; missing and surplus words count as misplaced."""
        return fmean(positional_share(said, wanted) for said, wanted in _turns(task, state))


def expected(rounds: Sequence[Sequence[str]]) -> list[list[str]]:
    """The right replies: all words up to each turn, sorted."""
    return [sorted(words) for words in _so_far(rounds)]


def _so_far(rounds: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[word for words in rounds[: turn + 1] for word in words] for turn in range(len(rounds))]


def demonstrations(n: int, seed: int = 0, copy_share: float = 0.0, **args: Any) -> list[Row]:
    """`n` conversations, none of them a task of the eval split.

    A share of them repeats the words in the order they came instead of sorting them: reward then has something to
    sort out. `args` are those of the environment.
    """
    environment = SortWords(num_tasks=n, seed=seed, split="train", **args)
    copied = set(random.Random(seed).sample(range(n), round(copy_share * n)))
    rows = []
    for i, task in enumerate(environment.tasks()):
        given: list[list[str]] = task.data["rounds"]
        replies = _so_far(given) if i in copied else expected(given)
        messages = environment.prompt(task)
        for turn, reply in enumerate(replies):
            messages += [Message("user", " ".join(given[turn]))] if turn else []
            messages.append(Message("assistant", " ".join(reply)))
        rows.append(demonstration(messages))
    return rows


def _turns(task: Task, state: State) -> list[tuple[list[str], list[str]]]:
    said = [message.content.split() for message in state.messages if message.role == "assistant"]
    wanted = expected(task.data["rounds"])
    return list(zip(said + [[]] * (len(wanted) - len(said)), wanted, strict=True))
