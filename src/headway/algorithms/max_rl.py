"""Maximum-likelihood RL: advantages relative to the mean reward, so that rare successes weigh more."""

from headway.algorithms.base import Advantages, Algorithm, Group, compared, mean
from headway.algorithms.length_penalty import penalized_rewards
from headway.config.algorithms import LengthPenalty


class MaxRl(Algorithm):
    """A = (reward − mean) / mean, 0 when the mean is not positive."""

    def __init__(self, length_penalty: LengthPenalty | None = None) -> None:
        self.length_penalty = length_penalty

    def advantages(self, group: Group) -> Advantages:
        found = Advantages()
        for pool in compared(group.traces(), lambda trace: trace.agent):
            rewards = penalized_rewards(pool, self.length_penalty)
            center = mean(rewards)
            for trace, reward in zip(pool, rewards, strict=True):
                found[trace] = (reward - center) / center if center > 0 else 0.0
        return found
