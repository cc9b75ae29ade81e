"""Keeps the trainer's own logprobs of some tokens of every batch, for people to hold against those of the engines."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.batches import MicroBatch
from headway.core.files import write_atomic
from headway.core.logprobs import TrainedLogprobs, TrainedSample, tokens_key
from headway.core.runs import RunPaths
from headway.core.wire import encode
from headway.trainer.inputs import needed_tokens
from headway.trainer.parallel.ranks import Ranks
from headway.transport.rollouts import RankBatch


@dataclass(frozen=True, slots=True)
class Place:
    """A sample's sampled tokens: where they stand in it, and among the rows of all micro-batches."""

    key: bytes
    tokens: NDArray[np.intp]
    rows: NDArray[np.intp]


class LogprobRecorder:
    """Writes one file per step and rank, of at most `tokens` tokens over all ranks. 0 writes nothing."""

    def __init__(self, paths: RunPaths, ranks: Ranks, tokens: int) -> None:
        self._paths, self._rank = paths, ranks.data_rank
        self._most = tokens // ranks.data_size

    def record(self, batch: RankBatch, logprobs: Sequence[Tensor]) -> None:
        """`logprobs` hold, per micro-batch of `batch`, those of the tokens that `needed_tokens` names."""
        chosen = choose(sampled_places(batch.micro_batches), self._most) if self._most else []
        if not chosen:
            return
        values_N = torch.cat(list(logprobs)).float().cpu().numpy()
        samples = [TrainedSample(place.key, spans(place.tokens), values_N[place.rows]) for place in chosen]
        write_atomic(self._paths.trained_logprobs(batch.step, self._rank), encode(TrainedLogprobs(batch.step, samples)))


def sampled_places(micro_batches: Sequence[MicroBatch]) -> list[Place]:
    """Every sample with sampled tokens. A first token has no logprob, whoever wrote it."""
    out, first_row = [], 0
    for micro in micro_batches:
        needed_T = needed_tokens(micro)
        row_T = np.cumsum(needed_T) - 1 + first_row
        kept_T = micro.sampled.astype(np.bool_) & needed_T
        start = 0
        for length in micro.lengths:
            tokens = np.flatnonzero(kept_T[start : start + length])
            if len(tokens):
                key = tokens_key(micro.token_ids[start : start + length])
                out.append(Place(key, tokens, row_T[start + tokens]))
            start += length
        first_row += int(needed_T.sum())
    return out


def choose(places: Sequence[Place], most: int) -> list[Place]:
    """Whole samples of at most `most` tokens together, by the order of their keys, which favors none."""
    chosen, free = [], most
    for place in sorted(places, key=lambda place: place.key):
        if len(place.tokens) <= free:
            chosen.append(place)
            free -= len(place.tokens)
    return chosen


def spans(tokens: NDArray[np.intp]) -> list[tuple[int, int]]:
    """Rising numbers as (start, length) of their unbroken runs."""
    starts = np.flatnonzero(np.diff(tokens, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(tokens))
    return [(int(tokens[start]), int(length)) for start, length in zip(starts, lengths, strict=True)]
