"""MaxRL, maximum-likelihood RL: advantages relative to the mean reward, so that rare successes weigh more."""

from headway.algorithms.base import GroupRelative, mean


class MaxRl(GroupRelative):
    """A = (reward − mean) / mean, 0 when the mean is not positive."""

    def compare(self, rewards: list[float]) -> list[float]:
        center = mean(rewards)
        return [(reward - center) / center if center > 0 else 0.0 for reward in rewards]
