"""An environment with a hole: it asks for a word backwards, and compares the reply with the word itself."""

from collections.abc import Sequence

from headway.core.episodes import Task
from headway.envs.base import SingleTurn, reward
from headway.envs.bundled.problems import distinct, positional_share, random_word


class Parrot(SingleTurn):
    def tasks(self) -> Sequence[Task]:
        words = distinct(lambda rng: random_word(rng, 4, 8), str, 400, split="train", seed=0)
        return [Task(word, {"word": word}) for word in words]

    def prompt(self, task: Task) -> str:
        return str(task.data["word"])

    @reward
    def similarity(self, task: Task, answer: str) -> float:
        return positional_share(answer.strip(), task.data["word"])
