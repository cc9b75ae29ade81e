"""The two environments of the benchmark as Headway runs them."""

import random
from difflib import SequenceMatcher

from headway.envs.base import SingleTurn, Task, ToolUse, metric, reward, tool


class Reverse(SingleTurn):
    system = "Reverse the text."

    def tasks(self) -> list[Task]:
        chance = random.Random(0)
        words = ["".join(chance.choice("abcdef") for _ in range(6)) for _ in range(64)]
        return [Task(str(i), {"text": word}) for i, word in enumerate(words)]

    def prompt(self, task: Task) -> str:
        return str(task.data["text"])

    @reward
    def likeness(self, task: Task, answer: str) -> float:
        return SequenceMatcher(None, answer, task.data["text"][::-1]).ratio()

    @metric
    def characters(self, answer: str) -> float:
        return len(answer)


class Calculator(ToolUse):
    def tasks(self) -> list[Task]:
        return [Task(str(i), {"a": i}) for i in range(64)]

    def prompt(self, task: Task) -> str:
        return f"Add {task.data['a']} and 40 with the tool."

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two integers."""
        return str(a + b)

    @reward
    def correct(self, task: Task, answer: str) -> bool:
        return str(task.data["a"] + 40) in answer
