"""The task families of `reasoning-gym`, each with its own generator and scorer."""

import difflib
from collections.abc import Sequence
from typing import Any

from headway.core.episodes import Task
from headway.core.errors import UsageError
from headway.core.messages import Message
from headway.envs.adapters.packages import require
from headway.envs.base import SingleTurn, reward
from headway.envs.bundled.prompts import opening

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
        gym = require("reasoning_gym", "reasoning-gym", "environments")
        families = sorted(require("reasoning_gym.factory", "reasoning-gym", "environments").DATASETS)
        if dataset not in families:
            near = difflib.get_close_matches(dataset, families, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(families)}"
            raise UsageError(f'reasoning-gym has no family "{dataset}"; {hint}')
        try:
            self._dataset = gym.create_dataset(dataset, size=num_tasks, seed=seed, **(config or {}))
        except (TypeError, AssertionError, ValueError) as error:
            raise UsageError(f'reasoning-gym: family "{dataset}" refuses its config: {error}') from error
        self._system = system
        self._num_tasks = num_tasks

    def tasks(self) -> Sequence[Task]:
        return [Task(str(index), {"index": index}) for index in range(self._num_tasks)]

    def prompt(self, task: Task) -> list[Message]:
        return opening(self._system, self._dataset[task.data["index"]]["question"])

    @reward
    def score(self, task: Task, answer: str) -> float:
        entry = self._dataset[task.data["index"]]
        return float(self._dataset.score_answer(extract_answer(answer), entry))


def extract_answer(reply: str) -> str:
    """What stands between the last pair of <answer> tags, or all of `reply`."""
    before, found, _ = reply.rpartition("</answer>")
    inside = before.rpartition("<answer>")
    return (inside[2] if found and inside[1] else reply).strip()
