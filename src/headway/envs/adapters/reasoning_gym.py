"""The task families of `reasoning-gym`, each with its own generator and scorer."""

import random
from collections.abc import Sequence
from typing import Any

from headway.base.errors import UsageError
from headway.base.suggestions import did_you_mean, nearest
from headway.core.episodes import Task
from headway.core.messages import Message
from headway.envs.adapters import require
from headway.envs.base import SingleTurn, reward
from headway.envs.bundled.problems import Row, demonstration, opening

SYSTEM = "Solve the problem. Give only the final answer between <answer> and </answer>."


class ReasoningGym(SingleTurn):
    """`num_tasks` problems of the family `dataset`, scored by the family itself between 0 and 1.

    `config` holds the family's own settings. Problem i of a seed is always the same one; take another seed
    for evaluation. What stands between <answer> tags is scored, or the whole reply where there are none.
    """

    def __init__(
        self,
        *,
        dataset: str,
        num_tasks: int = 256,
        seed: int = 0,
        config: dict[str, Any] | None = None,
        system: str | None = SYSTEM,
    ) -> None:
        self._dataset = _create(dataset, num_tasks, seed, config)
        self._system = system
        self._num_tasks = num_tasks

    def modules(self) -> Sequence[str]:
        return [*super().modules(), "reasoning_gym"]

    def tasks(self) -> Sequence[Task]:
        return [Task(str(index), {"index": index}) for index in range(self._num_tasks)]

    def prompt(self, task: Task) -> list[Message]:
        return opening(self._system, self._dataset[task.data["index"]]["question"])

    def answer(self, task: Task) -> str:
        return str(self._dataset[task.data["index"]]["answer"])

    @reward
    def score(self, task: Task, answer: str) -> float:
        entry = self._dataset[task.data["index"]]
        return float(self._dataset.score_answer(extract_answer(answer), entry))


def demonstrations(n: int, seed: int = 0, wrong_share: float = 0.0, **args: Any) -> list[Row]:
    """`n` solved problems to warm a model up with; take a seed that neither training nor evaluation uses.

    A share of them gives the answer of another problem: reward then has something to sort out. `args` are those of
    the environment.
    """
    environment = ReasoningGym(num_tasks=n, seed=seed, **args)
    right = [environment.answer(task) for task in environment.tasks()]
    given, rng = list(right), random.Random(seed)
    for index in rng.sample(range(n), round(wrong_share * n)):
        given[index] = right[(index + rng.randrange(1, max(2, n))) % n]
    # Tags where they are asked for.
    form = "<answer>{}</answer>" if args.get("system", SYSTEM) == SYSTEM else "{}"
    return [
        demonstration([*environment.prompt(task), Message("assistant", form.format(answer))])
        for task, answer in zip(environment.tasks(), given, strict=True)
    ]


def _create(family: str, size: int, seed: int, config: dict[str, Any] | None) -> Any:
    """Raises UsageError where there is no such family, or its config is not one."""
    gym = require("reasoning_gym", "reasoning-gym", "environments")
    families = sorted(require("reasoning_gym.factory", "reasoning-gym", "environments").DATASETS)
    if family not in families:
        hint = did_you_mean(nearest(family, families), quote='"') or f"; there are {', '.join(families)}"
        raise UsageError(f'reasoning-gym has no family "{family}"{hint}')
    try:
        # Problem i is drawn with seed + i there: neighbouring seeds would share all but one of their problems.
        return gym.create_dataset(family, size=size, seed=(seed << 20) % 2**31, **(config or {}))
    except (TypeError, AssertionError, ValueError) as error:
        raise UsageError(f'reasoning-gym: family "{family}" refuses its config: {error}') from error


def extract_answer(reply: str) -> str:
    """The text between the last pair of <answer> tags, or all of `reply`."""
    before, found, _ = reply.rpartition("</answer>")
    inside = before.rpartition("<answer>")
    return (inside[2] if found and inside[1] else reply).strip()
