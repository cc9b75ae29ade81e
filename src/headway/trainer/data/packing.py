"""Rows of one step as micro-batches: equally many for every data rank, none longer than `seq_len`."""

from collections.abc import Iterator

import numpy as np

from headway.core.batches import ComponentCounts, MicroBatch
from headway.core.images import LoadImage, join_images, load_images
from headway.core.packing import Cost, plan_packing
from headway.trainer.data.order import Indices
from headway.trainer.data.rows import TokenRows


def micro_batches(
    rows: TokenRows, chosen: Indices, seq_len: int, rank: int, ranks: int, load_image: LoadImage | None = None
) -> Iterator[MicroBatch]:
    """Yield this rank's part of the step that trains the `chosen` rows. Rows with images need `load_image`."""
    bins = plan_packing(rows.lengths[chosen].tolist(), seq_len, ranks, Cost())[rank]
    return (_micro_batch(rows, [int(chosen[i]) for i in bin_], load_image) for bin_ in bins)


def counts_of(rows: TokenRows, chosen: Indices) -> ComponentCounts:
    """Count the learned tokens over all ranks."""
    return ComponentCounts(ce=sum(int(rows.learned[rows.starts[i] : rows.starts[i + 1]].sum()) for i in chosen))


def _micro_batch(rows: TokenRows, members: list[int], load_image: LoadImage | None) -> MicroBatch:
    if not members:
        return MicroBatch.join([])
    slices = [slice(int(rows.starts[i]), int(rows.starts[i + 1])) for i in members]
    micro = MicroBatch.blank([s.stop - s.start for s in slices])
    micro.token_ids = np.concatenate([rows.token_ids[s] for s in slices])
    micro.ce_weight = np.concatenate([rows.learned[s] for s in slices]).astype(np.float32)
    if load_image is not None:
        images = [load_images(rows.images.get(i, ()), load_image) for i in members]
        micro.images = join_images(list(zip(micro.lengths, images, strict=True)))
    return micro
