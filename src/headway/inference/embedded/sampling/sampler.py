"""Sampling: temperature, filters, seeds and logprobs, for all rows of a step at once."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.draws import uniform
from headway.inference.embedded.inputs.input_batch import InputBatch
from headway.inference.outputs import TopLogprobs
from headway.models import ops
from headway.models.ops.registry import in_c

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Sampled:
    """One token per row of logits. `top[i]` are the most likely tokens of row i, where it asked for them."""

    tokens: list[int]
    logprobs: list[float]
    top: list[TopLogprobs] | None


def sample(logits_NV: Tensor, rows: InputBatch, which: Ints, positions: Ints) -> Sampled:
    """Draw one token from each row of float32 logits; row i belongs to sequence row `which[i]`.

    `positions[i]` is where the token will stand in its sequence. The draw depends on (seed, position) and the
    row's own distribution alone, so it is the same in any batch. Logprobs are those of the distribution that
    was drawn from: after shape, temperature and filters; where decoding is greedy, after the shape alone. Raises
    FloatingPointError where no row's logits are finite, as those of a model that has diverged; where single rows' are
    not, their logprobs are NaN.
    """
    if in_c(logits_NV) and not rows.special[which].any():
        return _checked(*rows.sampling.draw(logits_NV, which, positions), None)
    logits = logits_NV
    shaped = np.flatnonzero(rows.shaped[which]).tolist()
    for i in shaped:
        logits = logits.clone() if logits is logits_NV else logits
        rows.shapers[int(which[i])].apply(logits[i])
    if rows.tempered[which].any():
        logits = logits / torch.from_numpy(rows.temperature[which]).to(logits.device)[:, None]
    if rows.filtered[which].any():
        logits = _filter(logits, rows, which)
    noise = np.where(rows.greedy[which], np.float32(-1), uniform(rows.seed[which], positions))
    tokens, logprobs = ops.draw_tokens(logits, None, torch.from_numpy(noise).to(logits.device))
    most = rows.top_logprobs[which]
    top = top_logprobs(torch.log_softmax(logits, dim=-1), most) if most.any() else None
    drawn = tokens.tolist()
    for i in shaped:
        rows.shapers[int(which[i])].accept(drawn[i])
    return _checked(drawn, logprobs.tolist(), top)


def _checked(tokens: list[int], logprobs: list[float], top: list[TopLogprobs] | None) -> Sampled:
    if all_nan(logprobs):
        raise FloatingPointError("the model's logits are not finite")
    return Sampled(tokens, logprobs, top)


def all_nan(logprobs: list[float]) -> bool:
    """Tell if every row failed, as those of a model that has diverged; single rows fail alone."""
    return math.isnan(sum(logprobs)) and all(map(math.isnan, logprobs))


def top_logprobs(logprobs_NV: Tensor, counts: Ints) -> list[TopLogprobs]:
    """List the `counts[i]` most likely tokens of row i with logprobs, best first, without impossible ones."""
    values, ids = logprobs_NV.topk(min(int(counts.max()), logprobs_NV.shape[-1]), dim=-1)
    pairs = zip(ids.tolist(), values.tolist(), counts.tolist(), strict=True)
    return [
        [(i, v) for i, v in zip(row_ids[:n], row_values[:n], strict=True) if v > -np.inf]
        for row_ids, row_values, n in pairs
    ]


def _filter(logits_NV: Tensor, rows: InputBatch, which: Ints) -> Tensor:
    """Set logits to -inf outside min-p and top-k, then outside top-p of what is left."""
    picked = torch.from_numpy(np.flatnonzero(rows.filtered[which])).to(logits_NV.device)
    subset = which[rows.filtered[which]]
    vocab = logits_NV.shape[-1]
    values, ids = logits_NV[picked].sort(dim=-1, descending=True, stable=True)
    top_k = np.where(rows.top_k[subset] > 0, np.minimum(rows.top_k[subset], vocab), vocab)
    drop = torch.arange(vocab, device=values.device) >= torch.from_numpy(top_k).to(values.device)[:, None]
    min_p = torch.from_numpy(rows.min_p[subset]).to(values.device)[:, None]
    drop |= values < values[:, :1] + torch.log(min_p)
    values = values.masked_fill(drop, -torch.inf)
    probs = values.softmax(-1)
    # A token stays if what is more likely than it does not yet make up top_p: the best one always stays.
    top_p = torch.from_numpy(rows.top_p[subset]).to(values.device)[:, None]
    values = values.masked_fill((probs.cumsum(-1) - probs >= top_p) & (top_p < 1), -torch.inf)
    restored = torch.empty_like(values).scatter_(1, ids, values)
    return logits_NV.index_copy(0, picked, restored)
