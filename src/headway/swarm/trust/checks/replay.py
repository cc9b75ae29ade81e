"""The environment's part of episodes: what it asked, and how it rewarded the replies, computed again."""

import math

from headway.core.episodes import Episode, Trace
from headway.swarm.trust.checks.base import PlayedClaim

CLOSE = 1e-9
"""Other machines may round the last digits of a reward otherwise."""


class PlayedAgain:
    """Refuses episodes in which the environment asks for something else, or rewards otherwise, when it is given the
    same replies again."""

    name = "rewards"

    def refuse(self, claim: PlayedClaim) -> str | None:
        for index, (claimed, again) in enumerate(zip(claim.contribution.episodes, claim.played, strict=True)):
            if reason := _difference(claimed, again):
                return f"episode {index}: {reason}"
        return None


def _difference(claimed: Episode, again: Episode) -> str | None:
    if again.error is not None:
        return f"it can't be played again: {again.error.message[:200]}"
    if len(again.traces) != len(claimed.traces):
        return "the environment has another number of agents"
    for trace, same in zip(claimed.traces, again.traces, strict=True):
        if _conversation(trace) != _conversation(same):
            return "the environment asks for something else"
        if trace.rewards.keys() != same.rewards.keys():
            return "it claims rewards that the environment does not have"
        pairs = [(trace.reward, same.reward), *((trace.rewards[name], same.rewards[name]) for name in same.rewards)]
        if not all(math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE) for a, b in pairs):
            return f"it claims a reward of {trace.reward:g}; the environment gives {same.reward:g}"
    return None


def _conversation(trace: Trace) -> tuple[object, ...]:
    nodes = [(node.parent, node.token_ids, node.message, node.sampled) for node in trace.nodes]
    return (trace.agent, trace.truncated, trace.rewrites, trace.problem, nodes)
