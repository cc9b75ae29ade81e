"""Grpo, and a cross-entropy on what the environment said back, so that the policy also learns its world."""

from collections.abc import Mapping

from headway.algorithms.base import Group, Rollout
from headway.algorithms.grpo import Grpo, Normalize
from headway.core.episodes import Trace
from headway.core.samples import Sample


class Echo(Grpo):
    """`roles` are the weights of observation tokens by the role of their message."""

    def __init__(self, roles: Mapping[str, float], normalize: Normalize = "none") -> None:
        super().__init__(normalize)
        self.roles = dict(roles)

    def score(self, group: Group) -> None:
        super().score(group)
        for rollout in group.rollouts:
            self._weigh_observations(rollout)

    def _weigh_observations(self, rollout: Rollout) -> None:
        """A node that several branches share counts in the first of them only."""
        counted: set[tuple[int, int]] = set()
        for trace, sample in rollout.parts:
            start = 0
            for index in branch_of(trace, sample):
                node = trace.nodes[index]
                stop = start + len(node.token_ids)
                weight = self.roles.get(node.message.role, 0.0) if node.message and not node.sampled else 0.0
                if weight and (id(trace), index) not in counted:
                    counted.add((id(trace), index))
                    sample.ce_weight[start:stop] = weight
                start = stop


def branch_of(trace: Trace, sample: Sample) -> list[int]:
    """The nodes whose tokens the sample is made of. Raises ValueError when it is none of the trace's branches."""
    tokens = sample.token_ids.tolist()
    for branch in trace.branches():
        if [token for index in branch for token in trace.nodes[index].token_ids] == tokens:
            return branch
    raise ValueError("the sample is not a branch of this trace")
