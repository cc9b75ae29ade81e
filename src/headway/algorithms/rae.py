"""RAE, role-conditioned advantage estimation for self-play (https://arxiv.org/abs/2506.24119)."""

from typing import Any

from headway.algorithms.base import Advantages, Algorithm, Group


class Rae(Algorithm):
    """A = reward − the agent's moving average of its own rewards, measured before that reward enters it."""

    relative = False

    def __init__(self, decay: float) -> None:
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
