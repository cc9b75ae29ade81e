"""The form of a contribution: the episodes that were ordered, whole, and numbers that can be numbers of this model."""

import math

from headway.core.episodes import MAX_REWARD, Episode, Node, Trace
from headway.swarm.messages.orders import WorkOrder
from headway.swarm.trust.checks.base import Claim

MOST_NODES = 4096
LONGEST_TEXT = 1 << 16
"""Bytes of notes and of the names of rewards and metrics together."""


class Form:
    """Refuses contributions that are not all episodes of their order, or could not be computed again."""

    name = "form"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def refuse(self, claim: Claim) -> str | None:
        order, episodes = claim.order, claim.contribution.episodes
        if len(episodes) != len(order.seeds):
            return f"it has {len(episodes)} of {len(order.seeds)} episodes"
        for index, episode in enumerate(episodes):
            if reason := self._refuse_episode(order, index, episode):
                return f"episode {index}: {reason}"
        return None

    def _refuse_episode(self, order: WorkOrder, index: int, episode: Episode) -> str | None:
        request = order.request(index)
        named = (episode.id, episode.group_id, episode.env, episode.task, episode.version, episode.evaluation)
        if named != (request.episode_id, order.id, order.env, order.task, order.version, False):
            return "it is not the episode that was ordered"
        if episode.error is not None:
            return f"it failed: {episode.error.message[:200]}"
        if len(episode.traces) != 1:
            return f"it has {len(episode.traces)} agents; a swarm plays environments of one"
        return _refuse_trace(episode.traces[0]) or self._refuse_nodes(order, episode.traces[0])

    def _refuse_nodes(self, order: WorkOrder, trace: Trace) -> str | None:
        lengths: list[int] = []
        for index, node in enumerate(trace.nodes):
            if not -1 <= node.parent < index:
                return "its tree of tokens is none"
            lengths.append(len(node.token_ids) + (lengths[node.parent] if node.parent >= 0 else 0))
            if lengths[-1] > order.context:
                return f"a conversation has more than {order.context} tokens"
            if not all(0 <= token < self._vocab_size for token in node.token_ids):
                return "a token is not in the vocabulary"
            if not node.sampled:
                continue
            if lengths[-1] == len(node.token_ids):
                return "a reply answers nothing"
            if reason := _refuse_reply(order, node):
                return reason
        return None


def _refuse_trace(trace: Trace) -> str | None:
    values = (trace.reward, *trace.rewards.values(), *trace.metrics.values())
    if not all(math.isfinite(value) for value in values) or not abs(trace.reward) <= MAX_REWARD:
        return "a reward or metric is not a number, or too large"
    texts = (*trace.notes, *trace.notes.values(), *trace.rewards, *trace.metrics, trace.agent, trace.problem or "")
    if sum(len(text.encode(errors="replace")) for text in texts) > LONGEST_TEXT:
        return f"its notes and names take more than {LONGEST_TEXT} bytes"
    if len(trace.nodes) > MOST_NODES:
        return f"it has more than {MOST_NODES} nodes"
    if not any(node.sampled and node.token_ids for node in trace.nodes):
        return "nothing was sampled"
    return None


def _refuse_reply(order: WorkOrder, node: Node) -> str | None:
    assert node.logprobs is not None
    if len(node.logprobs) != len(node.token_ids):
        return "a reply has another number of logprobs than of tokens"
    if not all(math.isfinite(value) and value <= 1e-3 for value in node.logprobs):
        return "a logprob is not one"
    if node.temperature != order.sampling.temperature:
        return f"a reply was sampled at temperature {node.temperature:g}"
    if node.versions != [(order.version, len(node.token_ids))]:
        return f"tokens are not all of version {order.version}"
    if node.routed_experts is not None:
        return "it has routed experts, which are not checked"
    return None
