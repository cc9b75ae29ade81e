"""The sampled replies of a trace, branch by branch, each once: the order in which they are computed and proven."""

from collections.abc import Iterator
from typing import NamedTuple

from headway.core.episodes import Node, Trace


class SampledReply(NamedTuple):
    """A reply, the `call`-th of its episode, whose tokens are `start .. end` of a branch."""

    node: Node
    call: int
    start: int
    end: int


class ReplyBranch(NamedTuple):
    """The tokens of a branch, and the replies in it that no earlier branch has."""

    token_ids: list[int]
    replies: list[SampledReply]


def reply_branches(trace: Trace) -> Iterator[ReplyBranch]:
    """Go through the branches of a trace. Empty replies are left out."""
    calls = {index: call for call, index in enumerate(i for i, node in enumerate(trace.nodes) if node.sampled)}
    for branch in trace.branches():
        replies = []
        for index, (node, start, end) in zip(branch, trace.spans(branch), strict=True):
            # A reply that several branches share was sampled once.
            call = calls.pop(index, None)
            if call is not None and start < end:
                replies.append(SampledReply(node, call, start, end))
        yield ReplyBranch([token for index in branch for token in trace.nodes[index].token_ids], replies)
