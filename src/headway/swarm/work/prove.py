"""A worker's proofs of activations: made after sampling, in passes of their own; sampling pays nothing for them."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

from headway.core.activations import Places, TopStates
from headway.core.episodes import Episode
from headway.swarm.messages.proofs import encode_proof, numbers_sent, proven_positions
from headway.swarm.messages.replies import reply_branches

StatesOf = Callable[[Sequence[Places], int], Awaitable[list[TopStates]]]
"""Computes the states at places of sequences and returns so many of the largest numbers of each, by sequence."""


async def prove(episodes: Sequence[Episode], states_of: StatesOf, width: int) -> list[bytes]:
    """Return the proof of each episode, for a model whose hidden states have this width."""
    places = [_places(episode) for episode in episodes]
    states = iter(await states_of([each for own in places for each in own], numbers_sent(width)))
    return [encode_proof(TopStates.join(list(islice(states, len(own))))) if own else b"" for own in places]


def _places(episode: Episode) -> list[Places]:
    branches = (branch for trace in episode.traces for branch in reply_branches(trace) if branch.replies)
    return [Places(branch.token_ids, proven_positions(branch.replies)) for branch in branches]
