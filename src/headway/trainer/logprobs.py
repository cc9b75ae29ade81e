"""Recording of the trainer's own logprobs of some tokens of every batch, to compare with those of the engines."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.batches import MicroBatch
from headway.core.records import TrainedLogprobs, TrainedSample, write_trained_logprobs
from headway.core.runs import RunPaths
from headway.core.samples import BranchKey
from headway.trainer.inputs import needed_tokens
from headway.trainer.parallel.ranks import Ranks
from headway.transport.rollouts import RankBatch


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A sample's sampled tokens: their positions in it, and their rows among those of all micro-batches."""

    key: BranchKey
    tokens: NDArray[np.intp]
    rows: NDArray[np.intp]


class LogprobRecorder:
    """Writes one file per step and data rank, of at most `tokens` tokens over all. 0 writes nothing.

    Only samples that have a key are recorded: nobody could find the others again.
    """

    def __init__(self, paths: RunPaths, ranks: Ranks, tokens: int) -> None:
        self._paths, self._rank = paths, ranks.data_rank
        self._most = tokens // ranks.data_size if ranks.leads_context else 0

    def record(self, batch: RankBatch, logprobs: Sequence[Tensor]) -> None:
        """`logprobs` hold, per micro-batch of `batch`, those of the tokens that `needed_tokens` names."""
        chosen = choose(sampled_tokens(batch.micro_batches), self._most) if self._most else []
        if not chosen:
            return
        values_N = torch.cat(list(logprobs)).float().cpu().numpy()
        samples = [TrainedSample(sample.key, spans(sample.tokens), values_N[sample.rows]) for sample in chosen]
        write_trained_logprobs(self._paths, self._rank, TrainedLogprobs(batch.step, samples))


def sampled_tokens(micro_batches: Sequence[MicroBatch]) -> list[SampledTokens]:
    """Find every sample with a key and sampled tokens. A first token has no logprob, whoever wrote it."""
    out, first_row = [], 0
    for micro in micro_batches:
        needed_T = needed_tokens(micro)
        row_T = np.cumsum(needed_T) - 1 + first_row
        kept_T = micro.sampled & needed_T
        start = 0
        for key, length in zip(micro.keys, micro.lengths, strict=False):
            tokens = np.flatnonzero(kept_T[start : start + length])
            if len(tokens):
                out.append(SampledTokens(key, tokens, row_T[start + tokens]))
            start += length
        first_row += int(needed_T.sum())
    return out


def choose(samples: Sequence[SampledTokens], most: int) -> list[SampledTokens]:
    """Choose whole samples of at most `most` tokens together, in the order of their random ids, which favors none."""
    chosen, free = [], most
    for sample in sorted(samples, key=lambda sample: sample.key):
        if len(sample.tokens) <= free:
            chosen.append(sample)
            free -= len(sample.tokens)
    return chosen


def spans(tokens: NDArray[np.intp]) -> list[tuple[int, int]]:
    """Return rising numbers as (start, length) of their unbroken runs."""
    starts = np.flatnonzero(np.diff(tokens, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(tokens))
    return [(int(tokens[start]), int(length)) for start, length in zip(starts, lengths, strict=True)]
