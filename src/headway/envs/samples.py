"""Branches of an episode's trees as samples: token-aligned streams that an algorithm then fills with signal."""

from collections.abc import Sequence

import numpy as np

from headway.core.episodes import Episode, Node, Trace
from headway.core.images import ImageUse, LoadImage, TokenImages, load_images
from headway.core.samples import Sample
from headway.core.streams import Experts, Ints


def episode_samples(episode: Episode) -> list[Sample]:
    """Cut every branch of every trace, with all signal streams 0. One sample at most marks a token as sampled. Images
    are added later (`branch_images`)."""
    samples = []
    for number, trace in enumerate(episode.traces):
        for sample in trace_samples(trace):
            sample.episode_id, sample.trace = episode.id, number
            samples.append(sample)
    return samples


def trace_samples(trace: Trace) -> list[Sample]:
    """Cut the branches of one trace.

    A reply that several branches share is marked as sampled in the first only. A branch whose new replies were
    drawn at different temperatures becomes one sample for each, since a sample has one temperature: that of its
    logprobs, which is 1 where decoding was greedy.
    """
    samples = []
    marked: set[int] = set()
    for path in trace.branches():
        nodes = [trace.nodes[index] for index in path]
        fresh = [i for i, index in enumerate(path) if nodes[i].sampled and nodes[i].token_ids and index not in marked]
        marked.update(path[i] for i in fresh)
        for temperature in dict.fromkeys(nodes[i].temperature or 1.0 for i in fresh):
            sample = _sample(nodes, [i for i in fresh if (nodes[i].temperature or 1.0) == temperature])
            sample.temperature, sample.agent, sample.nodes = temperature, trace.agent, path
            samples.append(sample)
    return samples


def _sample(nodes: Sequence[Node], chosen: Sequence[int]) -> Sample:
    ends = np.cumsum([len(node.token_ids) for node in nodes])
    sample = Sample.blank(int(ends[-1]))
    sample.token_ids = np.concatenate([np.array(node.token_ids, dtype=np.int32) for node in nodes])
    for i in chosen:
        node, end = nodes[i], int(ends[i])
        start = end - len(node.token_ids)
        assert node.logprobs is not None
        sample.sampled[start:end] = True
        sample.logprobs[start:end] = node.logprobs
        sample.versions[start:end] = _unrolled(node)
    sample.routed_experts = _experts(nodes, len(sample))
    return sample


def branch_images(nodes: Sequence[Node], load_image: LoadImage) -> TokenImages | None:
    """Join the images of a branch, each once."""
    uses, start = list[ImageUse](), 0
    for node in nodes:
        uses += [ImageUse(start + image.at, image.tokens, image.digest) for image in node.images]
        start += len(node.token_ids)
    return load_images(uses, load_image)


def _unrolled(node: Node) -> Ints:
    """Expand to one version per token. Raises ValueError where the runs do not cover the node's tokens."""
    values = np.array([version for version, _ in node.versions], dtype=np.int32)
    unrolled: Ints = np.repeat(values, [count for _, count in node.versions])
    if len(unrolled) != len(node.token_ids):
        raise ValueError(f"versions cover {len(unrolled)} of {len(node.token_ids)} sampled tokens")
    return unrolled


def _experts(nodes: Sequence[Node], length: int) -> Experts | None:
    """Return the choices by token, the earliest record of each: the one made when the token was first computed."""
    records = [node.routed_experts for node in nodes if node.routed_experts is not None]
    if not records:
        return None
    _, layers, k = records[0].shape
    out: Experts = np.full((length, layers, k), -1, dtype=np.int16)
    filled = 0
    for record in records:
        start, end = max(record.start, filled), min(record.end, length)
        if start < end:
            out[start:end] = record.array()[start - record.start : end - record.start]
            filled = end
    return out
