"""Replies computed again by a trusted model, in one pass over all their tokens: far cheaper than sampling them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.core.draws import choice_seed, uniform
from headway.core.episodes import Trace
from headway.models.attention import PackedPlan
from headway.models.decoder import DecoderLM
from headway.models.packed import PackedTokens
from headway.swarm.rescored import Floats, Rescored

_PASS = 16_384
"""Tokens that are computed in one pass, unless a branch alone has more: passes over a few leave a GPU idle."""
_LOGITS = 1 << 26
"""Logits in memory at a time."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """Sampled tokens, the first of them at `start` of a branch."""

    start: int
    claimed: Floats
    noise: Floats


_Branch = tuple[list[int], list[_Reply]]
"""The tokens of a branch, and the replies in it that no earlier branch has."""


def rescore(model: DecoderLM, trace: Trace, seed: int, temperature: float) -> Rescored:
    """Compute the sampled tokens of a trace again. Its nodes must have passed the check of their form."""
    return rescore_all(model, [(trace, seed)], temperature)


@torch.no_grad()
def rescore_all(model: DecoderLM, traces: Sequence[tuple[Trace, int]], temperature: float) -> Rescored:
    """Compute the sampled tokens of traces, each given with its seed, again: many tokens in a pass."""
    branches = [branch for trace, seed in traces for branch in _branches(trace, seed)]
    parts = [part for packed in _passes(branches) for part in _rescore_pass(model, packed, temperature)]
    return Rescored.join(parts) if parts else Rescored(*(np.zeros(0) for _ in range(7)))


def _branches(trace: Trace, seed: int) -> Iterator[_Branch]:
    calls = {index: call for call, index in enumerate(i for i, node in enumerate(trace.nodes) if node.sampled)}
    for branch in trace.branches():
        replies = []
        for index, (node, start, end) in zip(branch, trace.spans(branch), strict=True):
            # A reply that several branches share was sampled once.
            call = calls.pop(index, None)
            if call is None or start == end:
                continue
            assert node.logprobs is not None
            claimed = np.asarray(node.logprobs, dtype=np.float64)
            replies.append(_Reply(start, claimed, _noise(seed + call, start, end)))
        yield [token for index in branch for token in trace.nodes[index].token_ids], replies


def _passes(branches: list[_Branch]) -> Iterator[list[_Branch]]:
    packed: list[_Branch] = []
    for branch in branches:
        if packed and sum(len(tokens) for tokens, _ in packed) + len(branch[0]) > _PASS:
            yield packed
            packed = []
        packed.append(branch)
    if packed:
        yield packed


def _rescore_pass(model: DecoderLM, branches: list[_Branch], temperature: float) -> Iterator[Rescored]:
    device, vocab = model.head_weight().device, model.config.vocab_size
    plan = PackedPlan([len(tokens) for tokens, _ in branches], device)
    ids_T = torch.tensor([token for tokens, _ in branches for token in tokens], device=device)
    hidden_TD = model(PackedTokens(ids_T, plan.positions, plan)).hidden_TD
    places, replies, offset = [], [], 0
    for tokens, found in branches:
        for reply in found:
            places.append(torch.arange(offset + reply.start, offset + reply.start + len(reply.claimed)))
            replies.append(reply)
        offset += len(tokens)
    if not replies:
        return
    places_N = torch.cat(places).to(device)
    claimed, noise = (np.concatenate([getattr(reply, name) for reply in replies]) for name in ("claimed", "noise"))
    rows = max(_LOGITS // vocab, 1)
    for at in range(0, len(places_N), rows):
        here_N = places_N[at : at + rows]
        logits_NV = model.logits(hidden_TD[here_N - 1]) / temperature
        yield _rescored(logits_NV, ids_T[here_N], claimed[at : at + rows], noise[at : at + rows])


def _noise(seed: int, start: int, end: int) -> Floats:
    """Draw as the embedded engine does for the tokens at positions `start .. end` of a reply with this seed."""
    seeds = np.full(end - start, choice_seed(seed, 0), dtype=np.uint64)
    return uniform(seeds, np.arange(start, end)).astype(np.float64)


def _rescored(logits_NV: Tensor, ids_N: Tensor, claimed: Floats, noise: Floats) -> Rescored:
    probs_NV = torch.softmax(logits_NV.double(), dim=-1)
    ids_N1 = ids_N[:, None]
    own_N1 = probs_NV.gather(1, ids_N1)
    high_N1 = probs_NV.cumsum(-1).gather(1, ids_N1)
    likelier = (probs_NV * (probs_NV > own_N1)).sum(-1)
    equal = (probs_NV * (probs_NV == own_N1)).sum(-1)
    columns = (
        own_N1[:, 0].log(),
        high_N1[:, 0] - own_N1[:, 0],
        high_N1[:, 0],
        likelier + equal / 2,
        (1 - probs_NV.pow(3).sum(-1)) / 12,
    )
    logprobs, low, high, rank, variance = (column.cpu().numpy() for column in columns)
    return Rescored(claimed, logprobs, noise, low, high, rank, variance)
