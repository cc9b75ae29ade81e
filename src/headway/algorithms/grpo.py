"""GRPO, group-relative policy optimization (https://arxiv.org/abs/2402.03300).

Its default, without division by the standard deviation, is Dr. GRPO's (https://arxiv.org/abs/2503.20783).
"""

from typing import Literal

from headway.algorithms.base import GroupRelative, mean, std
from headway.config.algorithms import LengthPenalty

Normalize = Literal["none", "std"]


class Grpo(GroupRelative):
    """A = reward − mean over traces of the same agent; `normalize = "std"` divides it by their standard deviation."""

    def __init__(self, normalize: Normalize, length_penalty: LengthPenalty | None) -> None:
        super().__init__(length_penalty)
        self.normalize = normalize

    def compare(self, rewards: list[float]) -> list[float]:
        center, scale = mean(rewards), std(rewards) if self.normalize == "std" else 1.0
        return [(reward - center) / scale for reward in rewards]
