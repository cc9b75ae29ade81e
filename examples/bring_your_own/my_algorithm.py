"""An algorithm of one's own: it sees whole groups of rollouts and writes the per-token streams."""

from typing import Any

from headway.algorithms.base import Advantages, Algorithm, Group


class Centered(Algorithm):
    """A = reward − moving average of all rewards, which survives a restart."""

    relative = False  # True where rollouts of a group are compared, which then has at least two

    def __init__(self, decay: float = 0.9) -> None:
        self.decay, self.average = decay, 0.0

    def advantages(self, group: Group) -> Advantages:
        found = Advantages()
        for trace in group.traces():
            found[trace] = trace.reward - self.average
            self.average = self.decay * self.average + (1 - self.decay) * trace.reward
        return found

    def save(self) -> dict[str, Any]:
        return {"average": self.average}

    def load(self, state: dict[str, Any]) -> None:
        self.average = state["average"]
