"""Replies computed again by a trusted model, in one pass over all their tokens: far cheaper than sampling them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.core.draws import choice_seed, uniform
from headway.core.episodes import Trace
from headway.models.attention import PackedPlan
from headway.models.decoder import DecoderLM
from headway.models.packed import PackedTokens
from headway.swarm.trust.rescored import Floats, Rescored

_PASS = 16_384
"""Tokens that are computed in one pass, unless a branch alone has more: passes over a few leave a GPU idle."""
_LOGITS = 1 << 26
"""Logits in memory at a time."""


_BLOCK = 128


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
    """Look at all logits in few passes: on a GPU these take most of the time, since vocabularies are large."""
    logits_NV = logits_NV.float()
    # Not divided by their sum, which is known to more digits than float32 has.
    parts_NV = (logits_NV - logits_NV.amax(-1, keepdim=True)).exp_()
    own_N1 = parts_NV.gather(1, ids_N[:, None])
    low_N, whole_N = _sums(parts_NV, ids_N)
    likelier_N = torch.where(parts_NV > own_N1, parts_NV, 0.0).sum(-1)
    equals_N = (parts_NV == own_N1).sum(-1)
    cubes_N = (torch.linalg.vector_norm(parts_NV, ord=3, dim=-1) / whole_N) ** 3
    own_N, low_N = own_N1[:, 0] / whole_N, low_N / whole_N
    rank_N = likelier_N / whole_N + equals_N * own_N / 2
    columns = (own_N.log(), low_N, low_N + own_N, rank_N, (1 - cubes_N) / 12)
    logprobs, low, high, rank, variance = (column.cpu().numpy() for column in columns)
    return Rescored(claimed, logprobs, noise, low, high, rank, variance)


def _sums(parts_NV: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the numbers before each id, and all of them, in double: of blocks first, and then some of one block."""
    vocab, blocks = parts_NV.shape[1], parts_NV.shape[1] // _BLOCK
    sums_NB = parts_NV[:, : blocks * _BLOCK].view(len(ids_N), blocks, _BLOCK).sum(-1)
    until_NB = F.pad(sums_NB.double().cumsum(-1), (1, 0))
    block_N1 = (ids_N // _BLOCK)[:, None]
    at_NC = block_N1 * _BLOCK + torch.arange(_BLOCK, device=ids_N.device)
    inside_NC = parts_NV.gather(1, at_NC.clamp(max=vocab - 1))
    inside_N = torch.where(at_NC < ids_N[:, None], inside_NC, 0.0).sum(-1)
    return until_NB.gather(1, block_N1)[:, 0] + inside_N, until_NB[:, -1] + parts_NV[:, blocks * _BLOCK :].sum(-1)
