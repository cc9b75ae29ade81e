"""A worker's proof of activations: made after sampling, in passes of its own, so that sampling pays nothing for it."""

from collections.abc import Awaitable, Callable, Sequence

from headway.core.activations import TopStates
from headway.core.episodes import Episode
from headway.swarm.messages.proofs import encode_proof, numbers_sent, proven_positions
from headway.swarm.messages.replies import reply_branches

StatesOf = Callable[[Sequence[int], Sequence[int], int], Awaitable[TopStates]]
"""Computes the states at positions of a sequence and returns so many of the largest numbers of each."""


async def prove(episode: Episode, states_of: StatesOf, width: int) -> bytes:
    """Return the proof of an episode, for a model whose hidden states have this width."""
    states = [
        await states_of(branch.token_ids, proven_positions(branch.replies), numbers_sent(width))
        for trace in episode.traces
        for branch in reply_branches(trace)
        if branch.replies
    ]
    return encode_proof(TopStates.join(states)) if states else b""
