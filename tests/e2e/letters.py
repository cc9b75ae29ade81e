"""An environment that an untrained model learns in a few steps: replies are to be of certain letters."""

from collections.abc import Sequence

from headway.envs.base import SingleTurn, Task, reward


class Letters(SingleTurn):
    """The reward is the share of a reply that is of the wanted letters."""

    def __init__(self, wanted: str = "abcdefghijklm") -> None:
        self._wanted = set(wanted)

    def tasks(self) -> Sequence[Task]:
        return [Task(f"{number}", {"number": number}) for number in range(16)]

    def prompt(self, task: Task) -> str:
        return f"{task.data['number']}"

    @reward
    def share(self, answer: str) -> float:
        return sum(letter in self._wanted for letter in answer.lower()) / max(1, len(answer))
