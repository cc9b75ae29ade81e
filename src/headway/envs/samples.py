"""Branches of an episode's trees as samples: token-aligned streams that an algorithm then fills with signal."""

from collections.abc import Sequence

import numpy as np

from headway.core.episodes import Episode, Node, Trace
from headway.core.samples import Experts, Flags, Floats, Ints, Sample


def episode_samples(episode: Episode) -> list[tuple[Trace, Sample]]:
    """Every branch of every trace, with all signal streams 0. Each sampled token is marked in exactly one sample."""
    pairs = []
    for trace in episode.traces:
        for _, sample in trace_samples(trace):
            sample.env = episode.env
            sample.group_id = episode.group_id
            sample.episode_id = episode.id
            sample.policy = episode.policy
            pairs.append((trace, sample))
    return pairs


def trace_samples(trace: Trace) -> list[tuple[list[int], Sample]]:
    """The samples of one trace, each with the path of nodes whose tokens it holds.

    A reply that several branches share is marked as sampled in the first only. A branch whose new replies were
    drawn at different temperatures becomes one sample for each, since a sample has one temperature.
    """
    out = []
    marked: set[int] = set()
    for path in trace.branches():
        nodes = [trace.nodes[index] for index in path]
        fresh = [i for i, index in enumerate(path) if nodes[i].sampled and nodes[i].token_ids and index not in marked]
        marked.update(path[i] for i in fresh)
        for temperature in dict.fromkeys(nodes[i].temperature for i in fresh):
            chosen = [i for i in fresh if nodes[i].temperature == temperature]
            sample = _sample(nodes, chosen, temperature)
            sample.agent = trace.agent
            out.append((path, sample))
    return out


def node_spans(trace: Trace, path: Sequence[int]) -> list[tuple[Node, int, int]]:
    """Each node of a path with the tokens `start .. end` that it holds in the sample."""
    spans, start = [], 0
    for index in path:
        node = trace.nodes[index]
        end = start + len(node.token_ids)
        spans.append((node, start, end))
        start = end
    return spans


def _sample(nodes: Sequence[Node], chosen: Sequence[int], temperature: float) -> Sample:
    ends = np.cumsum([len(node.token_ids) for node in nodes])
    length = int(ends[-1])
    token_ids: Ints = np.concatenate([np.array(node.token_ids, dtype=np.int32) for node in nodes])
    sampled: Flags = np.zeros(length, dtype=np.bool_)
    logprobs: Floats = np.zeros(length, dtype=np.float32)
    versions: Ints = np.full(length, -1, dtype=np.int32)
    for i in chosen:
        node, end = nodes[i], int(ends[i])
        start = end - len(node.token_ids)
        assert node.logprobs is not None
        sampled[start:end] = True
        logprobs[start:end] = node.logprobs
        versions[start:end] = _unrolled(node)
    return Sample(
        token_ids=token_ids,
        sampled=sampled,
        logprobs=logprobs,
        versions=versions,
        advantages=_zeros(length),
        rl_weight=_zeros(length),
        ce_weight=_zeros(length),
        ref_kl_weight=_zeros(length),
        ref_logprobs=_zeros(length),
        temperature=temperature,
        routed_experts=_experts(nodes, length),
    )


def _zeros(length: int) -> Floats:
    return np.zeros(length, dtype=np.float32)


def _unrolled(node: Node) -> Ints:
    """One version per token. Raises ValueError where the runs do not cover the node's tokens."""
    values = np.array([version for version, _ in node.versions], dtype=np.int32)
    unrolled: Ints = np.repeat(values, [count for _, count in node.versions])
    if len(unrolled) != len(node.token_ids):
        raise ValueError(f"versions cover {len(unrolled)} of {len(node.token_ids)} sampled tokens")
    return unrolled


def _experts(nodes: Sequence[Node], length: int) -> Experts | None:
    """Choices by token, the earliest record of each: the one made when the token was first computed."""
    records = [node.routed_experts for node in nodes if node.routed_experts is not None]
    if not records:
        return None
    _, layers, k = records[0].shape
    out: Experts = np.full((length, layers, k), -1, dtype=np.int16)
    filled = 0
    for record in records:
        choices = np.frombuffer(record.data, dtype=np.dtype(record.dtype)).reshape(record.shape)
        start, end = max(record.start, filled), min(record.start + record.shape[0], length)
        if start < end:
            out[start:end] = choices[start - record.start : end - record.start]
            filled = end
    return out
