"""GRPO for a proposer and solvers: solvers are compared on the same proposed problem, proposers with each other."""

from collections.abc import Hashable

from headway.algorithms.grpo import Grpo
from headway.core.episodes import Trace


class HierarchicalGrpo(Grpo):
    """GRPO whose pools are (agent, problem): a trace without a problem of its own works on the task itself."""

    def key(self, trace: Trace) -> Hashable:
        return trace.agent, trace.problem
