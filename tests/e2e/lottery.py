"""An environment without skill: replies win by chance, so that also an untrained model has a training signal."""

from collections.abc import Sequence

from headway.envs.base import SingleTurn, Task, reward


class Lottery(SingleTurn):
    """Whether a reply wins depends on its letters alone."""

    def tasks(self) -> Sequence[Task]:
        return [Task(f"{number}", {"number": number}) for number in range(16)]

    def prompt(self, task: Task) -> str:
        return f"Draw {task.data['number']}."

    @reward
    def luck(self, answer: str) -> float:
        return float(sum(answer.encode()) % 2)
