"""Proposer and solver: solvers are compared on the same proposed problem, proposers with each other."""

from headway.algorithms.grpo import Grpo
from headway.core.episodes import Trace


class HierarchicalGrpo(Grpo):
    """Grpo whose pools are (agent, problem): a trace without a problem of its own works on the task itself."""

    def key(self, trace: Trace) -> object:
        return trace.agent, trace.problem
