"""A filter of single rollouts of one's own: True keeps a rollout, False leaves it out of the batch."""

from headway.algorithms.base import Rollout


def answered(rollout: Rollout) -> bool:
    """Keep rollouts in which the policy said anything. What is dropped counts as `samples_dropped/answered`."""
    return any(sample.sampled.sum() > 1 for sample in rollout.samples)
