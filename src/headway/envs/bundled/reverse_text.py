"""Write a word backwards: the smallest task that a tiny model can learn from its own attempts."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.core.messages import Message
from headway.envs.base import SingleTurn, reward
from headway.envs.bundled.problems import Row, Split, demonstration, distinct, opening, positional_share, random_word
from headway.envs.rewards import Reward


class ReverseText(SingleTurn):
    """The user sends a word and wants it back reversed. Words of `split = "eval"` never occur in training.

    `exact` and `similarity` weigh the two rewards; a weight of 0 keeps one as a metric. By default they make a
    reward in [0, 1] that also tells a near miss from nonsense.
    """

    def __init__(
        self,
        *,
        num_tasks: int = 1024,
        min_len: int = 4,
        max_len: int = 8,
        split: Split = "train",
        seed: int = 0,
        system: str | None = None,
        exact: float = 0.5,
        similarity: float = 0.5,
    ) -> None:
        if not 1 <= min_len <= max_len:
            raise UsageError(f"reverse-text: min_len must be at least 1 and at most max_len (got {min_len}, {max_len})")
        self._words = distinct(lambda rng: random_word(rng, min_len, max_len), str, num_tasks, split=split, seed=seed)
        self._system = system
        self._weights = {"exact": exact, "similarity": similarity}

    def tasks(self) -> Sequence[Task]:
        return [Task(word, {"word": word}) for word in self._words]

    def prompt(self, task: Task) -> list[Message]:
        return opening(self._system, task.data["word"])

    @reward
    def exact(self, task: Task, answer: str) -> float:
        return float(answer.strip() == task.data["word"][::-1])

    @reward
    def similarity(self, task: Task, answer: str) -> float:
        return positional_share(answer.strip(), task.data["word"][::-1])

    def rewards(self) -> Sequence[Reward]:
        return [replace(item, weight=self._weights[item.name]) for item in super().rewards()]


def demonstrations(n: int, seed: int = 0, copy_share: float = 0.0, **args: Any) -> list[Row]:
    """`n` conversations to warm a model up with, none of them about a word of the eval split.

    A share of them copies the word instead of reversing it: reward then has something to sort out. `args` are those
    of the environment.
    """
    environment = ReverseText(num_tasks=n, seed=seed, split="train", **args)
    copied = set(random.Random(seed).sample(range(n), round(copy_share * n)))
    return [
        demonstration([*environment.prompt(task), Message("assistant", task.id if i in copied else task.id[::-1])])
        for i, task in enumerate(environment.tasks())
    ]
