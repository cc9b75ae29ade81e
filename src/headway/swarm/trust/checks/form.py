"""The form of a contribution: the episodes that were ordered, whole, and numbers that can be numbers of this model."""

import math

from headway.base.errors import UsageError
from headway.core.episodes import MAX_REWARD, Episode, Node, Trace
from headway.swarm.messages.orders import WorkOrder
from headway.swarm.messages.proofs import WIDEST, count_proven, decode_proof
from headway.swarm.trust.checks.base import Claim

MOST_NODES = 4096
LONGEST_TEXT = 1 << 16
"""Bytes of notes and of the names of rewards and metrics together."""


class Form:
    """Refuses contributions that are not all episodes of their order, or could not be computed again."""

    name = "form"

    def __init__(self, vocab_size: int, width: int) -> None:
        """Take the sizes of the run's model: of its vocabulary and of its hidden states."""
        if width > WIDEST:
            raise UsageError(f"a swarm proves hidden states of up to {WIDEST} numbers; this model has {width}")
        self._vocab_size, self._width = vocab_size, width

    def refuse(self, claim: Claim) -> str | None:
        order, episodes, proofs = claim.order, claim.contribution.episodes, claim.contribution.proofs
        if len(episodes) != len(order.seeds):
            return f"it has {len(episodes)} of {len(order.seeds)} episodes"
        if len(proofs) != len(episodes):
            return f"it has {len(proofs)} proofs of activations for {len(episodes)} episodes"
        for index, (episode, proof) in enumerate(zip(episodes, proofs, strict=True)):
            if reason := self._refuse_episode(order, index, episode) or self._refuse_proof(episode, proof):
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

    def _refuse_proof(self, episode: Episode, proof: bytes) -> str | None:
        try:
            decode_proof(proof, count_proven(episode.traces[0]), self._width)
        except ValueError as error:
            return str(error)
        return None

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
