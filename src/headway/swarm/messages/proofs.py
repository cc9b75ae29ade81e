"""Proofs of activations: the largest numbers of the last hidden states at some places of every reply, as bytes.

The idea is TOPLOC's (Prime Intellect, arXiv 2501.16007). There, proofs hold a polynomial through the numbers, which
saves bytes; here, they hold the numbers themselves, so that a verifier can measure how far off they are.
"""

from collections.abc import Sequence

import numpy as np

from headway.core.activations import TopStates
from headway.core.episodes import Trace
from headway.swarm.messages.replies import SampledReply, reply_branches

INTERVAL = 32
"""Sampled tokens from one proven place of a reply to the next."""
MOST_NUMBERS = 16
"""Numbers of a hidden state that are sent."""
WIDEST = 1 << 16
"""Indices have two bytes."""
_ENTRY = np.dtype([("index", "<u2"), ("value", "<f4")])


def numbers_sent(width: int) -> int:
    """Count the numbers that are sent of a hidden state of this width."""
    return min(MOST_NUMBERS, width)


def proven_positions(replies: Sequence[SampledReply]) -> list[int]:
    """Return the positions of a branch whose states are proven: those from which every 32nd token of each reply, and
    its last one, are drawn."""
    return [
        place - 1
        for reply in replies
        for place in (*range(reply.start + INTERVAL - 1, reply.end - 1, INTERVAL), reply.end - 1)
    ]


def count_proven(trace: Trace) -> int:
    """Count the states of a trace that are proven."""
    return sum(len(proven_positions(branch.replies)) for branch in reply_branches(trace))


def encode_proof(states: TopStates) -> bytes:
    """Encode the states of an episode: an index in two bytes and a number in four, for each number of each state."""
    entries = np.empty(states.indices_PK.shape, dtype=_ENTRY)
    entries["index"], entries["value"] = states
    return entries.tobytes()


def decode_proof(data: bytes, states: int, width: int) -> TopStates:
    """Decode a proof of so many states of this width. Raises ValueError where it is none."""
    count = numbers_sent(width)
    if len(data) != states * count * _ENTRY.itemsize:
        raise ValueError(f"its proof has {len(data)} bytes; {states} states of {count} numbers take another number")
    entries = np.frombuffer(data, dtype=_ENTRY).reshape(states, count)
    indices_PK, values_PK = entries["index"].astype(np.int64), entries["value"].astype(np.float32)
    if (indices_PK >= width).any():
        raise ValueError(f"its proof names numbers that a state of {width} does not have")
    if (np.diff(np.sort(indices_PK, axis=1), axis=1) == 0).any():
        raise ValueError("its proof names a number twice")
    if not np.isfinite(values_PK).all():
        raise ValueError("its proof has numbers that are none")
    return TopStates(indices_PK, values_PK)
