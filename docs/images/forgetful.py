"""An environment with a mistake, for the picture of an audit."""

from headway.core.episodes import Task
from headway.envs.base import reward
from headway.envs.bundled.reverse_text import ReverseText


class Forgetful(ReverseText):
    """Words to reverse, and a reward that forgot to reverse them: a copy of the prompt earns it."""

    @reward
    def exact(self, task: Task, answer: str) -> float:
        return float(answer.strip() == task.data["word"])
