"""An environment of one's own, which an untrained model can already get some reward from."""

from headway.envs.base import SingleTurn, Task, reward


class Vowels(SingleTurn):
    """Say something with many vowels."""

    def tasks(self) -> list[Task]:
        return [Task(word, {"word": word}) for word in ("tree", "ocean", "rhythm", "queue", "sky", "audio")]

    def prompt(self, task: Task) -> str:
        return task.data["word"]

    @reward
    def vowels(self, answer: str) -> float:
        return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))
