"""Sparse attention over paged blocks: tokens choose positions by the cached index keys, and attend to these alone."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.cache.store import KvStore
from headway.inference.embedded.device.copies import to_device
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.masked import masked_attention
from headway.models.packed import IndexScores
from headway.models.sparse_attention import choose_positions

Ints = NDArray[np.int64]

_NUMBERS = 1 << 25
"""Numbers of gathered keys at a time."""


class SparseReader:
    """The sequences of one step. `table` (sequences, blocks) names their blocks in order; sequence i runs `counts[i]`
    tokens from position `starts[i]` on."""

    def __init__(self, store: KvStore, table: Ints, starts: Ints, counts: Ints) -> None:
        self._store = store
        device, ends = store.device, np.cumsum(counts)
        self.reach = int((starts + counts).max())
        self._table = to_device(table[:, : -(-self.reach // store.block_size)], device)
        self._rows_T = to_device(np.repeat(np.arange(len(counts)), counts), device)
        # Decoding sequences are one batch, and prompts one each.
        single = np.flatnonzero(counts == 1)
        members = [single] if len(single) else []
        members += [np.array([i]) for i in np.flatnonzero(counts > 1)]
        self._batches = [
            _Batch(
                to_device(which, device),
                to_device((ends - counts)[which][:, None] + np.arange(counts[which[0]]), device),
                to_device(starts[which][:, None] + np.arange(counts[which[0]]), device),
                int((starts + counts)[which].max()),
            )
            for which in members
        ]

    def choose(self, scores: IndexScores, layer: int, count: int) -> Tensor:
        """Choose positions for all tokens of the step, (T, count), by the keys that the cache holds by now."""
        chosen = torch.empty((len(scores.k_TD), count), dtype=torch.int64, device=self._store.device)
        for batch in self._batches:
            places = torch.arange(batch.reach, device=self._store.device).expand(len(batch.rows_B), -1)
            keys_BSD = self._store.index_keys[layer][self._slots(batch.rows_B[:, None], places)]
            own = IndexScores(scores.q_TJD[batch.tokens_BQ], keys_BSD, scores.weights_TJ[batch.tokens_BQ])
            found = choose_positions(own, keys_BSD, batch.positions_BQ, count)
            chosen.index_copy_(0, batch.tokens_BQ.flatten(), found.flatten(0, 1))
        return chosen

    def attend(self, q_THD: Tensor, layer: AttentionLayer) -> Tensor:
        """Attend to `layer.chosen`: (T, H, size of a value)."""
        assert layer.chosen is not None
        cache, keys_SKD = self._store.caches[layer.index], self._store.keys[layer.index].numbers
        chosen_Tk, parts = layer.chosen.long(), []
        portion = max(1, _NUMBERS // max(1, chosen_Tk.shape[1] * keys_SKD[0].numel()))
        for start in range(0, len(q_THD), portion):
            own = slice(start, start + portion)
            slots_Tk = self._slots(self._rows_T[own, None], chosen_Tk[own].clamp(min=0))
            k_TKkD = keys_SKD[slots_Tk].transpose(1, 2)
            v_TKkD = k_TKkD[..., : cache.value_size]
            if not cache.values_in_keys:
                v_TKkD = self._store.values[layer.index].numbers[slots_Tk].transpose(1, 2)
            mask = torch.zeros(slots_Tk.shape, dtype=q_THD.dtype, device=q_THD.device)
            mask = mask.masked_fill_(chosen_Tk[own] < 0, -torch.inf)[:, None, None, :]
            parts.append(masked_attention(q_THD[own, None], k_TKkD, v_TKkD, mask, layer)[:, 0])
        return torch.cat(parts)

    def _slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        size = self._store.block_size
        return self._table[rows, positions // size] * size + positions % size


class _Batch:
    """Sequences that run equally many tokens: their rows of the table, packed tokens (B, Q) and these's positions. The
    furthest is before `reach`."""

    def __init__(self, rows_B: Tensor, tokens_BQ: Tensor, positions_BQ: Tensor, reach: int) -> None:
        self.rows_B, self.tokens_BQ, self.positions_BQ, self.reach = rows_B, tokens_BQ, positions_BQ, reach
