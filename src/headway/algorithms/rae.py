"""Role-conditioned advantage estimation, for self-play: each agent is measured against its own past."""

from typing import Any

from headway.algorithms.base import Advantages, Algorithm, Group


class Rae(Algorithm):
    """A = reward − the agent's moving average of its own rewards, measured before that reward enters it."""

    relative = False

    def __init__(self, decay: float = 0.95) -> None:
        self.decay = decay
        self.averages: dict[str, float] = {}

    def advantages(self, group: Group) -> Advantages:
        found = Advantages()
        for trace in group.traces():
            average = self.averages.get(trace.agent, 0.0)
            found[trace] = trace.reward - average
            self.averages[trace.agent] = self.decay * average + (1 - self.decay) * trace.reward
        return found

    def save(self) -> dict[str, Any]:
        return {"averages": self.averages}

    def load(self, state: dict[str, Any]) -> None:
        self.averages = {str(agent): float(value) for agent, value in state.get("averages", {}).items()}
