"""REINFORCE, leave one out: the baseline of a rollout is the mean of the others."""

from headway.algorithms.base import Advantages, Algorithm, Group, compared
from headway.algorithms.length_penalty import penalized_rewards
from headway.config.algorithms import LengthPenalty


class Rloo(Algorithm):
    """A = reward − mean of the other rollouts' rewards; 0 for a trace without others."""

    def __init__(self, length_penalty: LengthPenalty | None = None) -> None:
        self.length_penalty = length_penalty

    def advantages(self, group: Group) -> Advantages:
        found = Advantages()
        for pool in compared(group.traces(), lambda trace: trace.agent):
            rewards = penalized_rewards(pool, self.length_penalty)
            total, others = sum(rewards), len(rewards) - 1
            for trace, reward in zip(pool, rewards, strict=True):
                found[trace] = reward - (total - reward) / others if others else 0.0
        return found
