"""REINFORCE++ with a group baseline: rewards minus their group's mean, normalized over the batch."""

from collections.abc import Sequence

from headway.algorithms.base import Group, mean, spread
from headway.algorithms.grpo import Grpo


class ReinforcePp(Grpo):
    """A = (d − mean(d)) / std(d) with d = reward − group mean, over the rollouts of the batch."""

    def finish_batch(self, groups: Sequence[Group]) -> None:
        samples = [sample for group in groups for _, sample in group.parts() if sample.sampled.any()]
        if not samples:
            return
        values = [float(sample.advantages[sample.sampled][0]) for sample in samples]
        center, deviation = mean(values), spread(values)
        scale = deviation if deviation > 1e-9 else 1.0
        for sample, value in zip(samples, values, strict=True):
            sample.advantages[sample.sampled] = (value - center) / scale
