"""Rows of one step as micro-batches: equally many for every data rank, none longer than `seq_len`."""

import numpy as np

from headway.core.batches import ComponentCounts, MicroBatch
from headway.core.packing import Cost, plan_packing
from headway.trainer.data.order import Indices
from headway.trainer.data.rows import TokenRows


def micro_batches(rows: TokenRows, chosen: Indices, seq_len: int, rank: int, ranks: int) -> list[MicroBatch]:
    """Return this rank's part of the step that trains the `chosen` rows."""
    bins = plan_packing(rows.lengths[chosen].tolist(), seq_len, ranks, Cost())[rank]
    return [_micro_batch(rows, [int(chosen[i]) for i in bin_]) for bin_ in bins]


def counts_of(rows: TokenRows, chosen: Indices) -> ComponentCounts:
    """Count the learned tokens over all ranks."""
    return ComponentCounts(ce=sum(int(rows.learned[rows.starts[i] : rows.starts[i + 1]].sum()) for i in chosen))


def _micro_batch(rows: TokenRows, members: list[int]) -> MicroBatch:
    if not members:
        return MicroBatch.join([])
    slices = [slice(int(rows.starts[i]), int(rows.starts[i + 1])) for i in members]
    micro = MicroBatch.blank([s.stop - s.start for s in slices])
    micro.token_ids = np.concatenate([rows.token_ids[s] for s in slices])
    micro.ce_weight = np.concatenate([rows.learned[s] for s in slices]).astype(np.float32)
    return micro
