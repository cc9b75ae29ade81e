"""The environment of Headway's side."""

from collections.abc import Sequence

from headway.core.episodes import Task
from headway.core.messages import Message
from headway.envs.base import SingleTurn, reward
from trl_parts.stories import PROMPTS, score


class Story(SingleTurn):
    def tasks(self) -> Sequence[Task]:
        return [Task(prompt) for prompt in PROMPTS]

    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", task.id)]

    @reward
    def letters(self, answer: str) -> float:
        return score(answer)
