"""Replies computed again by a trusted model, in one pass over all their tokens: far cheaper than sampling them."""

import numpy as np
import torch
from torch import Tensor

from headway.core.draws import choice_seed, uniform
from headway.core.episodes import Trace
from headway.models.attention import PackedPlan
from headway.models.decoder import DecoderLM
from headway.models.packed import PackedTokens
from headway.swarm.rescored import Floats, Rescored

_CHUNK = 256
"""Rows of logits in memory at a time."""


@torch.no_grad()
def rescore(model: DecoderLM, trace: Trace, seed: int, temperature: float) -> Rescored:
    """Compute the sampled tokens of a trace again. Its nodes must have passed the check of their form."""
    calls = {index: call for call, index in enumerate(i for i, node in enumerate(trace.nodes) if node.sampled)}
    parts: list[Rescored] = []
    for branch in trace.branches():
        tokens = [token for index in branch for token in trace.nodes[index].token_ids]
        hidden_TD = _hidden(model, tokens)
        for index, (node, start, end) in zip(branch, trace.spans(branch), strict=True):
            # A reply that several branches share was sampled once.
            call = calls.pop(index, None)
            if call is None or start == end:
                continue
            assert node.logprobs is not None
            noise = _noise(seed + call, start, end)
            for at in range(start, end, _CHUNK):
                until = min(at + _CHUNK, end)
                logits_NV = model.logits(hidden_TD[at - 1 : until - 1]) / temperature
                claimed = np.asarray(node.logprobs[at - start : until - start], dtype=np.float64)
                parts.append(_rescored(logits_NV, tokens[at:until], claimed, noise[at - start : until - start]))
    return Rescored.join(parts) if parts else Rescored(*(np.zeros(0) for _ in range(7)))


def _hidden(model: DecoderLM, tokens: list[int]) -> Tensor:
    device = model.head_weight().device
    ids_T, positions_T = torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device)
    hidden_TD: Tensor = model(PackedTokens(ids_T, positions_T, PackedPlan([len(tokens)], device))).hidden_TD
    return hidden_TD


def _noise(seed: int, start: int, end: int) -> Floats:
    """Draw as the embedded engine does for the tokens at positions `start .. end` of a reply with this seed."""
    seeds = np.full(end - start, choice_seed(seed, 0), dtype=np.uint64)
    return uniform(seeds, np.arange(start, end)).astype(np.float64)


def _rescored(logits_NV: Tensor, tokens: list[int], claimed: Floats, noise: Floats) -> Rescored:
    probs_NV = torch.softmax(logits_NV.double(), dim=-1)
    ids_N1 = torch.tensor(tokens, device=probs_NV.device)[:, None]
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
