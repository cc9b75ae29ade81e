"""Tasks that an untrained model learns in a few steps and that contradict each other: replies of certain letters."""

from collections.abc import Callable, Mapping, Sequence

from headway.envs.base import SingleTurn, Task, reward

WANTED: Mapping[str, Callable[[str], bool]] = {
    "plain": str.isascii,
    "strange": lambda character: not character.isascii(),
    "small": str.islower,
}


class Letters(SingleTurn):
    """The reward is the share of a reply's characters that are wanted."""

    def __init__(self, wanted: str = "plain") -> None:
        self._wanted = WANTED[wanted]

    def tasks(self) -> Sequence[Task]:
        return [Task(f"{number}", {"number": number}) for number in range(16)]

    def prompt(self, task: Task) -> str:
        return f"{task.data['number']}"

    @reward
    def share(self, answer: str) -> float:
        return sum(map(self._wanted, answer)) / max(1, len(answer))
