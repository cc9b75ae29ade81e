"""REINFORCE++ with a group baseline (https://arxiv.org/abs/2501.03262)."""

from collections.abc import Sequence

from headway.algorithms.base import Group, mean, std
from headway.algorithms.grpo import Grpo


class ReinforcePp(Grpo):
    """A = (d − mean(d)) / std(d) with d = reward − group mean, over the rollouts of the batch."""

    def finish_batch(self, groups: Sequence[Group]) -> None:
        samples = [sample for group in groups for _, sample in group.samples() if sample.sampled.any()]
        if not samples:
            return
        values = [float(sample.advantages[sample.sampled][0]) for sample in samples]
        center, scale = mean(values), std(values)
        for sample, value in zip(samples, values, strict=True):
            sample.advantages[sample.sampled] = (value - center) / scale
