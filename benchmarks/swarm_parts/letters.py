"""An environment that an untrained tiny model learns within a few steps: replies are to have early letters only."""

from collections.abc import Sequence

from headway.core.episodes import Task
from headway.envs.base import SingleTurn, reward

EARLY = frozenset("abcdefghijklm")


class Letters(SingleTurn):
    """The reward is the share of a reply's letters that come from the first half of the alphabet."""

    def tasks(self) -> Sequence[Task]:
        return [Task(f"{number}", {"number": number}) for number in range(64)]

    def prompt(self, task: Task) -> str:
        return f"Letters for {task.data['number']}."

    @reward
    def early(self, answer: str) -> float:
        return sum(letter in EARLY for letter in answer) / max(1, len(answer))
