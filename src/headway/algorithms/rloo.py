"""RLOO, REINFORCE leave-one-out (https://arxiv.org/abs/2402.14740)."""

from headway.algorithms.base import GroupRelative


class Rloo(GroupRelative):
    """A = reward − mean of the other rollouts' rewards; 0 for a trace without others."""

    def compare(self, rewards: list[float]) -> list[float]:
        total, others = sum(rewards), len(rewards) - 1
        return [reward - (total - reward) / others if others else 0.0 for reward in rewards]
