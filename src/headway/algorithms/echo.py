"""Echo: GRPO, and a cross-entropy on what the environment replied, so that the policy also learns its world."""

from collections.abc import Mapping

from headway.algorithms.base import Group, Rollout
from headway.algorithms.grpo import Grpo, Normalize


class Echo(Grpo):
    """`roles` are the weights of observation tokens by the role of their message."""

    def __init__(self, roles: Mapping[str, float], normalize: Normalize) -> None:
        super().__init__(normalize, length_penalty=None)
        self.roles = dict(roles)

    def score(self, group: Group) -> None:
        super().score(group)
        for rollout in group.rollouts:
            self._weigh_observations(rollout)

    def _weigh_observations(self, rollout: Rollout) -> None:
        """Set the cross-entropy weights. A node that several branches share counts in the first of them only."""
        counted: set[tuple[int, int]] = set()
        for sample in rollout.samples:
            spans = rollout.episode.traces[sample.trace].spans(sample.nodes)
            for index, (node, start, end) in zip(sample.nodes, spans, strict=True):
                weight = self.roles.get(node.message.role, 0.0) if node.message and not node.sampled else 0.0
                if weight and (sample.trace, index) not in counted:
                    counted.add((sample.trace, index))
                    sample.ce_weight[start:end] = weight
