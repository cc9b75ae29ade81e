"""Find one fact in a long text: how far back a model can look."""

import random
from collections.abc import Sequence
from typing import Any

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.core.messages import Message
from headway.envs.base import SingleTurn, metric, reward
from headway.envs.bundled.arithmetic import last_number
from headway.envs.bundled.problems import Row, Split, demonstration, distinct, opening

SYSTEM = "Read the text, then answer the question with the number only."

_COLORS = ("red", "blue", "green", "black", "white", "amber", "violet", "grey")
_PLACES = ("door", "gate", "chest", "room", "tower", "cellar")
_WHO = ("The gardener", "A traveller", "The old clerk", "My neighbour", "The captain", "A quiet child")
_DID = ("walked along", "spoke about", "painted", "remembered", "looked at", "was fond of")
_WHAT = ("the river", "a long letter", "the market", "an empty street", "the harbour", "a basket of pears")


class Needle(SingleTurn):
    """A text of about `length` characters with `facts` codes strewn in; the question asks for one of them."""

    def __init__(
        self,
        *,
        num_tasks: int = 256,
        length: int = 2000,
        facts: int = 3,
        split: Split = "train",
        seed: int = 0,
        system: str | None = SYSTEM,
    ) -> None:
        if length < 1 or not 1 <= facts <= len(_COLORS) * len(_PLACES):
            raise UsageError(f"needle: length must be at least 1, facts from 1 to {len(_COLORS) * len(_PLACES)}")
        self._length, self._facts, self._system = length, facts, system
        self._seeds = distinct(lambda rng: rng.getrandbits(32), str, num_tasks, split=split, seed=seed)

    def tasks(self) -> Sequence[Task]:
        return [Task(str(seed), {"seed": seed}) for seed in self._seeds]

    def prompt(self, task: Task) -> list[Message]:
        return opening(self._system, self.haystack(task)[0])

    def haystack(self, task: Task) -> tuple[str, int, float]:
        return haystack(task.data["seed"], self._length, self._facts)

    @reward
    def found(self, task: Task, answer: str) -> float:
        return float(last_number(answer) == self.haystack(task)[1])

    @metric
    def depth(self, task: Task) -> float:
        """The place of the fact: 0 at the beginning of the text, 1 at its end."""
        return self.haystack(task)[2]


def haystack(seed: int, length: int, facts: int) -> tuple[str, int, float]:
    """The text with its question, the code asked for, and the fact's depth in the text."""
    rng = random.Random(seed)
    sentences: list[str] = []
    written = 0
    while written < length:
        sentences.append(f"{rng.choice(_WHO)} {rng.choice(_DID)} {rng.choice(_WHAT)}.")
        written += len(sentences[-1]) + 1
    places = rng.sample([f"{color} {place}" for color in _COLORS for place in _PLACES], facts)
    codes = rng.sample(range(1000, 10000), facts)
    wanted = f"The code of the {places[0]} is {codes[0]}."
    for place, code in zip(places, codes, strict=True):
        sentences.insert(rng.randint(0, len(sentences)), f"The code of the {place} is {code}.")
    text = " ".join(sentences)
    return f"{text}\n\nWhat is the code of the {places[0]}?", codes[0], text.index(wanted) / len(text)


def demonstrations(n: int, seed: int = 0, *, length: int = 200, **args: Any) -> list[Row]:
    """`n` right answers about texts of the train split. `args` are those of the environment."""
    environment = Needle(num_tasks=n, seed=seed, length=length, split="train", **args)
    rows = []
    for task in environment.tasks():
        _, code, _ = environment.haystack(task)
        rows.append(demonstration([*environment.prompt(task), Message("assistant", str(code))]))
    return rows
