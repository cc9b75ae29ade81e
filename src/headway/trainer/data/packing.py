"""Rows of one step packed into micro-batches: equally many for every rank, none longer than `seq_len`."""

import heapq

import numpy as np
from numpy.typing import NDArray

from headway.core.batches import ComponentCounts, MicroBatch
from headway.trainer.data.order import Indices
from headway.trainer.data.rows import TokenRows

_FILLING = 2
"""Tokens of a micro-batch without rows, which a rank runs so that collectives stay in step."""


def pack(lengths: NDArray[np.int64], seq_len: int, ranks: int) -> list[list[list[int]]]:
    """For each rank, bins of positions in `lengths`; bins hold at most `seq_len` tokens and are evenly loaded.

    Every position is in one bin. Ranks have equally many bins, some empty where there are fewer rows than ranks.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    count = -(-max(1, -(-int(lengths.sum()) // seq_len)) // ranks) * ranks
    while (bins := _fill(order, lengths, seq_len, count)) is None:
        count += ranks
    bins.sort(key=lambda rows: -sum(int(lengths[i]) for i in rows))
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    for turn in range(count // ranks):
        group = bins[turn * ranks : (turn + 1) * ranks]
        for rank, rows in enumerate(group if turn % 2 == 0 else group[::-1]):
            dealt[rank].append(rows)
    return dealt


def _fill(order: list[int], lengths: NDArray[np.int64], seq_len: int, count: int) -> list[list[int]] | None:
    """Longest first, each into the emptiest of `count` bins; None where one doesn't fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, index) for index in range(count)]
    for row in order:
        load, index = loads[0]
        size = int(lengths[row])
        if load + size > seq_len:
            return None
        bins[index].append(row)
        heapq.heapreplace(loads, (load + size, index))
    return bins


def micro_batches(rows: TokenRows, chosen: Indices, seq_len: int, rank: int, ranks: int) -> list[MicroBatch]:
    """This rank's part of the step that trains the `chosen` rows."""
    bins = pack(rows.lengths[chosen], seq_len, ranks)[rank]
    return [_micro_batch(rows, [int(chosen[i]) for i in bin]) for bin in bins]


def counts_of(rows: TokenRows, chosen: Indices) -> ComponentCounts:
    """Learned tokens over all ranks."""
    return ComponentCounts(ce=sum(int(rows.learned[rows.starts[i] : rows.starts[i + 1]].sum()) for i in chosen))


def _micro_batch(rows: TokenRows, members: list[int]) -> MicroBatch:
    slices = [slice(int(rows.starts[i]), int(rows.starts[i + 1])) for i in members]
    lengths = [s.stop - s.start for s in slices] or [_FILLING]
    size = sum(lengths)
    token_ids = np.concatenate([rows.token_ids[s] for s in slices]) if slices else np.zeros(size, np.int32)
    learned = np.concatenate([rows.learned[s] for s in slices]) if slices else np.zeros(size, np.bool_)
    zeros = np.zeros(size, np.float32)
    return MicroBatch(
        token_ids=token_ids,
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        lengths=lengths,
        sampled=np.zeros(size, np.bool_),
        logprobs=zeros,
        versions=np.full(size, -1, np.int32),
        advantages=zeros,
        rl_weight=zeros,
        ce_weight=learned.astype(np.float32),
        ref_kl_weight=zeros,
        ref_logprobs=zeros,
        temperatures=np.ones(size, np.float32),
    )
