"""Group-relative policy optimization: a rollout is as good as it is better than its group's mean."""

from typing import Literal

from headway.algorithms.base import Advantages, Algorithm, Group, compared, mean, spread
from headway.algorithms.length_penalty import penalized_rewards
from headway.config.algorithms import LengthPenalty
from headway.core.episodes import Trace

Normalize = Literal["none", "std"]


class Grpo(Algorithm):
    """A = reward − mean over traces of the same agent; `normalize = "std"` divides it by their standard deviation."""

    def __init__(self, normalize: Normalize = "none", length_penalty: LengthPenalty | None = None) -> None:
        self.normalize: Normalize = normalize
        self.length_penalty = length_penalty

    def advantages(self, group: Group) -> Advantages:
        found = Advantages()
        for pool in compared(group.traces(), self.key):
            rewards = penalized_rewards(pool, self.length_penalty)
            center, scale = mean(rewards), self._scale(rewards)
            for trace, reward in zip(pool, rewards, strict=True):
                found[trace] = (reward - center) / scale
        return found

    def key(self, trace: Trace) -> object:
        return trace.agent

    def _scale(self, rewards: list[float]) -> float:
        if self.normalize == "none":
            return 1.0
        # Equal rewards leave rounding errors, which must not be blown up to advantages.
        deviation = spread(rewards)
        return deviation if deviation > 1e-9 else 1.0
