"""Attention over paged blocks on an accelerator: kernels read them in place, for prompts and decoding alike."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.inference.embedded.running.copies import to_device
from headway.inference.embedded.running.paged import StepLayout
from headway.inference.embedded.running.store import KvStore
from headway.models import ops
from headway.models.ops.attention.paged import Tiles
from headway.models.packed import AttentionLayer, AttentionPlan, Rope

Ints = NDArray[np.int64]

_ROWS, _ROWS_FLOAT32 = 64, 16
"""Queries times heads of a tile of a prompt. In float32 its products are single multiplications: fewer will do."""
_BUSY = 1024
"""Programs that fill a device; fewer tiles than that are split along their keys."""
_MOST_SPLITS = 16


class TilePlan(AttentionPlan):
    """Kernels over tiles of queries. `table` is each sequence's row of blocks, on the device. In a step that is
    `padded`, tokens in no tile get zeros: a NaN would spread."""

    def __init__(self, store: KvStore, table: Tensor, slots_T: Tensor, tiles: list[Tiles], padded: bool) -> None:
        self.slots_T = slots_T
        self._store = store
        self._table = table
        self._tiles = tiles
        self._padded = padded

    def attend_pre_rope(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rope: Rope, layer: AttentionLayer) -> Tensor:
        if not layer.plain:
            raise HeadwayError(f"layer {layer.index} attends in a way that kernels over tiles do not compute")
        store = self._store
        keys, values = store.keys[layer.index], store.values[layer.index]
        q_THD = ops.qk_norm_rope_to_cache(q_THD, k_TKD, v_TKD, *rope, self.slots_T, keys, values)
        out = torch.zeros_like(q_THD) if self._padded else torch.empty_like(q_THD)
        for tiles in self._tiles:
            ops.paged_attention(q_THD, keys, values, self._table, tiles, store.block_size, out)
        return out


def decode_splits(tiles: int, kv_heads: int) -> int:
    """The number of parts, a power of two, into which the keys of each of `tiles` decoding sequences are split."""
    splits = 1
    while splits < _MOST_SPLITS and tiles * kv_heads * splits < _BUSY:
        splits *= 2
    return splits


def prompt_queries(heads_per_kv: int, dtype: torch.dtype) -> int:
    """Queries of a tile of a prompt."""
    return max(1, (_ROWS_FLOAT32 if dtype is torch.float32 else _ROWS) // heads_per_kv)


def make_tiles(layout: StepLayout, queries: int, kv_heads: int, device: torch.device) -> list[Tiles]:
    """Decoding sequences by themselves, then prompts in tiles of `queries`."""
    firsts = np.cumsum(layout.counts) - layout.counts
    single = layout.counts == 1
    made = []
    if single.any():
        fields = np.stack([layout.rows, firsts, layout.starts, layout.counts])[:, single]
        made.append(_tiles(fields, 1, decode_splits(fields.shape[1], kv_heads), device))
    if not single.all():
        made.append(_tiles(cut(layout, firsts, np.flatnonzero(~single), queries), queries, 1, device))
    return made


def cut(layout: StepLayout, firsts: Ints, members: Ints, queries: int) -> Ints:
    """Sequences of several tokens in tiles of `queries`: row, first packed token, its position, count."""
    counts = layout.counts[members]
    pieces = -(-counts // queries)
    owner = np.repeat(members, pieces)
    offset = queries * (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
    left = np.minimum(queries, layout.counts[owner] - offset)
    return np.stack([layout.rows[owner], firsts[owner] + offset, layout.starts[owner] + offset, left])


def _tiles(fields: Ints, queries: int, splits: int, device: torch.device) -> Tiles:
    return Tiles.of(to_device(fields, device), queries, splits)
