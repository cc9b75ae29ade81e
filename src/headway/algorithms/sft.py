"""SFT on the rollouts of a frozen teacher."""

from headway.algorithms.base import Algorithm, Group
from headway.config.algorithms import ReferenceSettings


class Sft(Algorithm):
    """The teacher samples, and its tokens count in the ce loss. They carry no version, as no policy sampled them."""

    relative = False

    def __init__(self, teacher: ReferenceSettings) -> None:
        self.sampler = teacher

    def score(self, group: Group) -> None:
        for _, sample in group.samples():
            sample.ce_weight[sample.sampled] = 1.0
            sample.logprobs[:] = 0.0
            sample.versions[:] = -1
            sample.sampled[:] = False
