"""Attention over paged blocks on an accelerator: kernels read them in place, for prompts and decoding alike."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.cache.states import StepStates
from headway.inference.embedded.cache.store import KvStore
from headway.inference.embedded.device.copies import to_device
from headway.inference.embedded.inputs.layout import StepLayout
from headway.models import ops
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.paged import Tiles
from headway.models.packed import AttentionPlan, Recurrence, Rope

Ints = NDArray[np.int64]

_ROWS, _ROWS_FLOAT32 = 64, 16
"""Queries times heads of a tile of a prompt. In float32 its products are single multiplications: fewer will do."""
_LEAST_KEYS, _MOST_PARTS = 128, 64
"""Of a sequence that is cut along its keys."""


class TilePlan(AttentionPlan):
    """Kernels over tiles of queries. `table` is each sequence's row of blocks, on the device. In a step that is
    `padded`, tokens in no tile get zeros: a NaN would spread. `states` are those of recurrent layers."""

    def __init__(
        self,
        store: KvStore,
        table: Tensor,
        slots_T: Tensor,
        tiles: list[Tiles],
        padded: bool,
        states: StepStates | None = None,
    ) -> None:
        self.slots_T, self._states = slots_T, states
        self._store = store
        self._table = table
        self._tiles = tiles
        self._padded = padded

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer) -> Tensor:
        self._store.write(layer.index, self.slots_T, k_TKD, v_TKD)
        return self._attend(q_THD, layer)

    def attend_pre_rope(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rope: Rope, layer: AttentionLayer) -> Tensor:
        keys, values = self._store.keys[layer.index], self._store.values[layer.index]
        q_THD = ops.qk_norm_rope_to_cache(q_THD, k_TKD, v_TKD, *rope, self.slots_T, keys, values)
        return self._attend(q_THD, layer)

    def recur(self, layer: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        assert self._states is not None
        return self._states.recur(layer, recurrence, inputs)

    def _attend(self, q_THD: Tensor, layer: AttentionLayer) -> Tensor:
        store, table = self._store, self._table
        if layer.window is not None and layer.window >= table.shape[1] * store.block_size:
            layer = replace(layer, window=None)
        keys, values = store.keys[layer.index], store.values[layer.index]
        out = torch.zeros_like(q_THD) if self._padded else torch.empty_like(q_THD)
        for tiles in self._tiles:
            ops.paged_attention(q_THD, keys, values, table, tiles, layer, store.block_size, out)
        return out


def prompt_queries(heads_per_kv: int, dtype: torch.dtype) -> int:
    """Queries of a tile of a prompt."""
    return max(1, (_ROWS_FLOAT32 if dtype is torch.float32 else _ROWS) // heads_per_kv)


class KeyCutter:
    """Cuts sequences of one query each along their keys, so that no program of attention takes longer than its share.

    `at_once`: the programs that a device runs at a time.
    """

    def __init__(self, kv_heads: int, at_once: int) -> None:
        self.kv_heads = kv_heads
        self.at_once = at_once
        self.room = -(-at_once // kv_heads)
        """How many more parts than sequences there are at most."""

    @classmethod
    def over(cls, store: KvStore) -> "KeyCutter":
        """For the store's heads, on an H200 (`benchmarks/gpu_parts/attention_tiles.py`)."""
        kv_heads, head_dim = max((cache.kv_heads, cache.head_dim) for cache in store.caches)
        return cls(kv_heads, 1536 if head_dim <= 64 else 256 if store.fp8 else 512)

    def cut(self, rows: Ints, tokens: Ints, positions: Ints) -> Ints:
        """The parts, the longest first: row, token, position, count, the same of first parts alone, most keys of a
        part, number of the part, place."""
        lengths = positions + 1
        fair = -(-int(lengths.sum()) * self.kv_heads // self.at_once)
        size = max(fair, -(-int(lengths.max()) // _MOST_PARTS))
        size = -(-size // _LEAST_KEYS) * _LEAST_KEYS
        parts = -(-lengths // size)
        owner = np.repeat(np.arange(len(rows)), parts)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
        kept = np.where(parts > 1, parts, 0)
        places = np.cumsum(kept) - kept
        order = np.argsort(np.maximum(number * size - lengths[owner], -size), kind="stable")
        owner, number = owner[order], number[order]
        one, most = np.ones_like(owner), np.full_like(owner, size)
        splits = number == 0, most, number, places[owner]
        return np.stack([rows[owner], tokens[owner], positions[owner], one, *splits])

    def arrived(self, device: torch.device) -> Tensor:
        """The counters of `KeySplits`. What is cut has fewer than twice as many parts as its keys would fill."""
        return torch.zeros((2 * self.room, self.kv_heads), dtype=torch.int32, device=device)

    def tiles(self, rows: Ints, tokens: Ints, positions: Ints, device: torch.device) -> Tiles:
        return Tiles.split(to_device(self.cut(rows, tokens, positions), device), self.arrived(device))


def make_tiles(layout: StepLayout, queries: int, cutter: KeyCutter, device: torch.device) -> list[Tiles]:
    """Decoding sequences by themselves, then prompts in tiles of `queries`."""
    firsts = np.cumsum(layout.counts) - layout.counts
    single = layout.counts == 1
    made = []
    if single.any():
        made.append(cutter.tiles(layout.rows[single], firsts[single], layout.starts[single], device))
    if not single.all():
        tiles = cut_queries(layout, firsts, np.flatnonzero(~single), queries)
        made.append(Tiles.of(to_device(tiles, device), queries))
    return made


def cut_queries(layout: StepLayout, firsts: Ints, members: Ints, queries: int) -> Ints:
    """Cut sequences of several tokens in tiles of `queries`: row, first packed token, its position, count."""
    counts = layout.counts[members]
    pieces = -(-counts // queries)
    owner = np.repeat(members, pieces)
    offset = queries * (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
    left = np.minimum(queries, layout.counts[owner] - offset)
    return np.stack([layout.rows[owner], firsts[owner] + offset, layout.starts[owner] + offset, left])
