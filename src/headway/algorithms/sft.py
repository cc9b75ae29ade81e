"""Supervised learning from a frozen model's own rollouts."""

from headway.algorithms.base import Algorithm, Group
from headway.config.algorithms import ReferenceSettings


class Sft(Algorithm):
    """The teacher samples; its tokens count in the ce loss. No policy sampled them, so they carry no version."""

    relative = False

    def __init__(self, teacher: ReferenceSettings) -> None:
        self.sampler = teacher

    def score(self, group: Group) -> None:
        for _, sample in group.parts():
            sample.ce_weight[sample.sampled] = 1.0
            sample.logprobs[:] = 0.0
            sample.versions[:] = -1
            sample.sampled[:] = False
