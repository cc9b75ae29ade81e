"""Replies computed again by a trusted model, in one pass over all their tokens: far cheaper than sampling them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headway.core.draws import choice_seed, uniform
from headway.core.episodes import Trace
from headway.models.attention import PackedPlan
from headway.models.decoder import DecoderLM
from headway.models.packed import PackedTokens
from headway.models.passes import in_passes
from headway.swarm.messages.proofs import proven_positions
from headway.swarm.messages.replies import ReplyBranch, reply_branches
from headway.swarm.trust.rescored import Floats, Rescored

_LOGITS = 1 << 26
"""Logits in memory at a time."""
_BLOCK = 128
_Seeded = tuple[ReplyBranch, int]
"""A branch, and the seed of its episode."""


class _Tokens(NamedTuple):
    """Sampled tokens of a pass: where they are in it, the logprobs that are claimed, what their seeds draw, and whether
    the states that they are drawn from are proven."""

    at: NDArray[np.int64]
    claimed: Floats
    noise: Floats
    proven: NDArray[np.bool_]

    def part(self, rows: slice) -> "_Tokens":
        return _Tokens(self.at[rows], self.claimed[rows], self.noise[rows], self.proven[rows])


def rescore(model: DecoderLM, trace: Trace, seed: int, temperature: float) -> Rescored:
    """Compute the sampled tokens of a trace again. Its nodes must have passed the check of their form."""
    return rescore_all(model, [(trace, seed)], temperature)


@torch.no_grad()
def rescore_all(model: DecoderLM, traces: Sequence[tuple[Trace, int]], temperature: float) -> Rescored:
    """Compute the sampled tokens of traces, each given with its seed, again: many tokens in a pass."""
    branches = [(branch, seed) for trace, seed in traces for branch in reply_branches(trace)]
    packed = in_passes(branches, lambda seeded: seeded[0].token_ids)
    parts = [part for each in packed for part in _rescore_pass(model, each, temperature)]
    if not parts:
        none, no_states = np.zeros(0), np.zeros((0, model.config.width), dtype=np.float32)
        return Rescored(none, none, none, none, none, none, none, no_states)
    return Rescored.join(parts)


def _rescore_pass(model: DecoderLM, branches: list[_Seeded], temperature: float) -> Iterator[Rescored]:
    device, vocab = model.head_weight().device, model.config.vocab_size
    plan = PackedPlan([len(branch.token_ids) for branch, _ in branches], device)
    ids_T = torch.tensor([token for branch, _ in branches for token in branch.token_ids], device=device)
    hidden_TD = model(PackedTokens(ids_T, plan.positions, plan)).hidden_TD
    at, claimed, noise, offset = [], [], [], 0
    proven: list[int] = []
    for branch, seed in branches:
        at += [np.arange(offset + reply.start, offset + reply.end) for reply in branch.replies]
        claimed += [np.asarray(reply.node.logprobs, dtype=np.float64) for reply in branch.replies]
        noise += [_noise(seed + reply.call, reply.start, reply.end) for reply in branch.replies]
        proven += [offset + position + 1 for position in proven_positions(branch.replies)]
        offset += len(branch.token_ids)
    if not at:
        return
    at_N, rows = np.concatenate(at), max(_LOGITS // vocab, 1)
    tokens = _Tokens(at_N, np.concatenate(claimed), np.concatenate(noise), np.isin(at_N, proven))
    for first in range(0, len(at_N), rows):
        part = tokens.part(slice(first, first + rows))
        before_N = torch.from_numpy(part.at - 1).to(device)
        logits_NV = model.logits(hidden_TD[before_N]) / temperature
        states_PD = hidden_TD[before_N[torch.from_numpy(part.proven).to(device)]]
        yield _rescored(logits_NV, ids_T[before_N + 1], part, states_PD)


def _noise(seed: int, start: int, end: int) -> Floats:
    """Draw as the embedded engine does for the tokens at positions `start .. end` of a reply with this seed."""
    seeds = np.full(end - start, choice_seed(seed, 0), dtype=np.uint64)
    return uniform(seeds, np.arange(start, end)).astype(np.float64)


def _rescored(logits_NV: Tensor, ids_N: Tensor, tokens: _Tokens, states_PD: Tensor) -> Rescored:
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
    states = states_PD.float().cpu().numpy()
    return Rescored(tokens.claimed, logprobs, tokens.noise, low, high, rank, variance, states)


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
