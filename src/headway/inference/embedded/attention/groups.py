"""Sequences of a step that attend in one call: over blocks that were gathered, or in place."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.cache.store import KvStore
from headway.inference.embedded.inputs.layout import StepLayout
from headway.models import ops
from headway.models.ops.attention.kv_cache import CachedHeads
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.masked import masked_attention

Ints = NDArray[np.int64]


@dataclass(slots=True)
class BlockGroup:
    """Sequences of similar query and context length, attended in one padded call over their gathered blocks.

    `tokens` are the packed tokens of the (batch x queries) padded queries, None where they are all tokens in order;
    `valid` are the padded queries that are real, None where all are. `mask` is added to the scores.
    """

    store: KvStore
    batch: int
    queries: int
    blocks: Tensor
    mask: Tensor
    tokens: Tensor | None = None
    valid: Tensor | None = None

    def attend(self, q_NHD: Tensor, layer: AttentionLayer) -> Tensor:
        """(batch x queries, H, size of a value) for padded queries over this group's blocks."""
        store, index = self.store, layer.index
        keys = self._gather(store.keys[index])
        values = self._gather_values(keys, index)
        q_BQHD = q_NHD.view(self.batch, self.queries, *q_NHD.shape[1:])
        return masked_attention(q_BQHD, keys, values, self.mask, layer).flatten(0, 1)

    def _gather(self, heads: CachedHeads) -> Tensor:
        _, kv_heads, dim = heads.numbers.shape
        picked = heads.by_blocks(self.store.block_size).read(self.blocks, self.store.dtype)
        return picked.view(self.batch, -1, kv_heads, dim).transpose(1, 2)

    def _gather_values(self, keys: Tensor, index: int) -> Tensor:
        """Those of layer `index`; where they are part of its keys, they were gathered with these."""
        cache = self.store.caches[index]
        return keys[..., : cache.value_size] if cache.values_in_keys else self._gather(self.store.values[index])


class DirectGroup:
    """Tokens for which a C kernel reads their sequences' blocks where they are. `tokens` None: the whole step."""

    def __init__(self, store: KvStore, layout: StepLayout, tokens: Ints | None) -> None:
        rows_T, positions_T = layout.token_rows, layout.positions_T
        if tokens is not None:
            rows_T, positions_T = rows_T[tokens], positions_T[tokens]
        self.tokens = None if tokens is None else torch.from_numpy(tokens)
        self._store = store
        self._table, self._rows, self._positions = map(torch.from_numpy, (layout.blocks, rows_T, positions_T))
        self._longest = int(positions_T.max())

    def attend(self, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, layer: int) -> Tensor:
        store = self._store
        keys, values = store.keys[layer], store.values[layer]
        return ops.paged_token_attention(
            q_BHD, keys, values, self._table, self._rows, self._positions, store.block_size, self._longest
        )
