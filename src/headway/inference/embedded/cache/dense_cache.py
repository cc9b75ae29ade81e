"""Decoding on a CPU without gathering blocks: keys and values of running sequences side by side, row by row."""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.cache.store import KvStore

Ints = NDArray[np.int64]

_WASTE = 3.0
"""Padding that is still cheaper than gathering: positions attended over per position that counts."""


class DenseCache:
    """A dense copy, (rows, kv heads, positions, head size) per layer, of the blocks of decoding sequences. Values that
    are part of keys are a view of these here, too.

    A sequence's row is filled from its blocks when it starts to decode; after that every step adds one position. The
    blocks remain: other sequences share them, and new rows are filled from them. `budget` bounds the copy's bytes;
    beyond it, and where padding would waste too much, steps gather from blocks instead.
    """

    def __init__(self, store: KvStore, max_rows: int, budget: int) -> None:
        self._store = store
        self._budget = budget
        self._filled: Ints = np.zeros(max_rows, dtype=np.int64)
        self._rows = 0
        self._positions = 0
        self.values_in_keys = [cache.values_in_keys for cache in store.caches]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.positions = torch.arange(0)

    def enter(self, row: int) -> None:
        """Forget what `row` held: a new sequence has it."""
        self._filled[row] = 0

    def group(
        self, which: Ints, blocks: Ints, positions: Ints, tokens: Tensor | None, heads_per_kv: int
    ) -> "DenseGroup | None":
        """Prepare one step of the sequences in rows `which`, each with one token at its position; None to gather.

        `blocks` is the table of all rows. `tokens` are the indices of their tokens in the step, None where these are
        all of its tokens in order.
        """
        span, reach = int(which.max()) + 1, int(positions.max()) + 1
        if span * reach > _WASTE * (int(positions.sum()) + len(which)) or not self._reserve(span, reach):
            return None
        for index in np.flatnonzero(self._filled[which] != positions):
            self._fill(int(which[index]), blocks[which[index]], int(positions[index]))
        self._filled[which] = positions + 1
        return DenseGroup(self, which, positions, span, reach, tokens, heads_per_kv)

    def _reserve(self, rows: int, positions: int) -> bool:
        """Grow to at least this size; False where that is over budget."""
        if rows <= self._rows and positions <= self._positions:
            return True
        numbers = sum(cache.numbers - cache.index_dim for cache in self._store.caches)
        room = self._budget // (numbers * self._store.dtype.itemsize)
        rows = (
            max(self._rows, _power_of_two(rows)) if _power_of_two(rows) * positions <= room else max(self._rows, rows)
        )
        # Twice as far as needed, so that growing is rare; near the budget, as far as there is room.
        positions = max(self._positions, min(_power_of_two(positions), room // rows), positions)
        if rows * positions > room:
            return False
        old_keys, old_values = self.keys, self.values
        self.keys, self.values = [], []
        for cache in self._store.caches:
            shape = (rows, cache.kv_heads, positions)
            keys = torch.zeros((*shape, cache.head_dim), dtype=self._store.dtype)
            self.keys.append(keys)
            self.values.append(
                keys[..., : cache.value_size] if cache.values_in_keys else keys.new_zeros((*shape, cache.value_size))
            )
        for old, new in zip(old_keys + old_values, self.keys + self.values, strict=bool(old_keys)):
            new[: self._rows, :, : self._positions] = old
        self.positions = torch.arange(positions)
        self._rows, self._positions = rows, positions
        return True

    def _fill(self, row: int, table: Ints, length: int) -> None:
        size = self._store.block_size
        positions = np.arange(length)
        slots = torch.from_numpy(table[positions // size] * size + positions % size)
        for layer in range(len(self.keys)):
            self.keys[layer][row, :, :length] = self._store.keys[layer].numbers[slots].transpose(0, 1)
            if not self._store.caches[layer].values_in_keys:
                self.values[layer][row, :, :length] = self._store.values[layer].numbers[slots].transpose(0, 1)


class DenseGroup:
    """The decoding sequences of one step. `tokens` None: they are the whole step."""

    def __init__(
        self,
        cache: DenseCache,
        which: Ints,
        positions: Ints,
        span: int,
        reach: int,
        tokens: Tensor | None,
        heads_per_kv: int,
    ) -> None:
        self.tokens = tokens
        self._cache = cache
        self._span, self._reach = span, reach
        self._values_in_keys = cache.values_in_keys
        _, kv_heads, capacity, _ = next(keys.shape for keys in cache.keys if keys.shape[1])
        heads = which[:, None] * kv_heads + np.arange(kv_heads)
        self._written = torch.from_numpy((heads * capacity + positions[:, None]).reshape(-1))
        # Rows in order from 0 need no moving; with holes between them, queries go to their rows and back.
        in_order = span == len(which) and bool((which[1:] > which[:-1]).all())
        self._moved = None if in_order else torch.from_numpy(which)
        last = positions
        if not in_order:
            last = np.zeros(span, dtype=np.int64)
            last[which] = positions
        hidden = cache.positions[:reach] > torch.from_numpy(last)[:, None]
        mask = torch.zeros(hidden.shape, dtype=cache.keys[0].dtype).masked_fill_(hidden, -torch.inf)
        self._mask = mask[:, None, None, :].expand(-1, -1, heads_per_kv, -1)

    def attend(self, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, layer: int) -> Tensor:
        """(B, H, size of a value) for B sequences with one token each."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        batch, kv_heads, dim = k_BKD.shape
        keys.view(-1, dim).index_copy_(0, self._written, k_BKD.reshape(-1, dim))
        if not self._values_in_keys[layer]:
            values.view(-1, values.shape[-1]).index_copy_(0, self._written, v_BKD.reshape(-1, values.shape[-1]))
        q = q_BHD.reshape(batch, kv_heads, -1, dim)
        if self._moved is not None:
            q = q.new_zeros((self._span, *q.shape[1:])).index_copy_(0, self._moved, q)
        out = F.scaled_dot_product_attention(
            q,
            keys[: self._span, :, : self._reach],
            values[: self._span, :, : self._reach],
            attn_mask=self._mask,
        )
        if self._moved is not None:
            out = out.index_select(0, self._moved)
        return out.reshape(batch, -1, values.shape[-1])


def _power_of_two(count: int) -> int:
    """Round up to a power of two, at least 16."""
    return max(16, 1 << (count - 1).bit_length())
