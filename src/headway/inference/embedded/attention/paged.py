"""Attention over paged blocks: new keys and values are written to the cache, queries attend over what is there."""

from collections.abc import Sequence
from copy import copy
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.attention.groups import BlockGroup, DirectGroup
from headway.inference.embedded.attention.sparse import SparseReader
from headway.inference.embedded.cache.dense_cache import DenseCache, DenseGroup
from headway.inference.embedded.cache.states import StepStates
from headway.inference.embedded.cache.store import KvStore
from headway.inference.embedded.cpu.decoder import CpuDecoder
from headway.inference.embedded.device.copies import to_device
from headway.inference.embedded.inputs.layout import StepLayout
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.masked import visible_mask
from headway.models.ops.registry import in_c
from headway.models.packed import AttentionPlan, IndexScores, Recurrence, Spans

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_SHORT = 64
"""Tokens of one sequence in a step up to which each reads the cache by itself; more are a product worth padding for."""


class PagedPlan(AttentionPlan):
    """C kernels, where they are compiled, read the blocks of sequences with few tokens in place. Otherwise decoding
    sequences use the dense cache, where it fits them. The rest is grouped by length, and so are all sequences in layers
    with a window, sinks or a scale, or with another number of query heads than the most.
    """

    takes_latent_keys = True

    def __init__(
        self,
        store: KvStore,
        layout: StepLayout,
        heads_per_kv: int,
        dense: DenseCache | None,
        states: StepStates | None = None,
    ) -> None:
        self._store, self._layout, self._heads_per_kv, self._states = store, layout, heads_per_kv, states
        size, positions = store.block_size, layout.positions_T
        slots = layout.blocks[layout.token_rows, positions // size] * size + positions % size
        self.slots_T = to_device(slots, store.device)
        self._dense = dense
        self._spans: Spans | None = None
        self._masked: dict[tuple[int | None, int], list[BlockGroup]] = {}

    def with_spans(self, spans: Spans) -> "PagedPlan":
        """All tokens of a span must be in this step."""
        plan = copy(self)
        plan._spans, plan._masked = spans, {}
        return plan

    @cached_property
    def _plain(self) -> tuple[DirectGroup | DenseGroup | None, list[BlockGroup]]:
        """The groups of plain layers: the sequences that decode, and the rest."""
        store, layout = self._store, self._layout
        rest = np.ones(len(layout.rows), dtype=np.bool_)
        decoding: DirectGroup | DenseGroup | None = None
        if in_c(store.keys[0].numbers) and store.of_equal_heads:
            short = layout.counts <= (_SHORT if self._spans is None else 1)
            decoding, rest = self._direct_group(short), ~short
        elif self._dense is not None:
            # What a sequence shares with another of this same step is not in the blocks yet, so no row can be filled.
            alone = (layout.counts == 1) & layout.settled
            decoding = self._dense_group(self._dense, alone)
            rest = rest if decoding is None else ~alone
        groups = self._block_groups(np.flatnonzero(rest), None, self._heads_per_kv) if rest.any() else []
        return decoding, groups

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer) -> Tensor:
        self._store.write(layer.index, self.slots_T, k_TKD, v_TKD)
        if layer.chosen is not None:
            return self._sparse.attend(q_THD, layer)
        heads_per_kv = q_THD.shape[1] // k_TKD.shape[1]
        if layer.plain and heads_per_kv == self._heads_per_kv:
            decoding, groups = self._plain
        else:
            decoding, groups = None, self._masked_groups(layer.window, heads_per_kv)
        if decoding is not None and decoding.tokens is None:
            return decoding.attend(q_THD, k_TKD, v_TKD, layer.index)
        if decoding is None and len(groups) == 1 and groups[0].tokens is None:
            return groups[0].attend(q_THD, layer)
        out = q_THD.new_empty((*q_THD.shape[:2], v_TKD.shape[-1]))
        if decoding is not None:
            tokens = decoding.tokens
            assert tokens is not None
            q, k, v = (x.index_select(0, tokens) for x in (q_THD, k_TKD, v_TKD))
            out.index_copy_(0, tokens, decoding.attend(q, k, v, layer.index))
        for group in groups:
            assert group.tokens is not None
            padded = group.attend(q_THD.index_select(0, group.tokens), layer)
            if group.valid is None:
                out.index_copy_(0, group.tokens, padded)
            else:
                out.index_copy_(0, group.tokens[group.valid], padded[group.valid])
        return out

    def recur(self, layer: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        assert self._states is not None
        return self._states.recur(layer, recurrence, inputs)

    def choose(self, scores: IndexScores, layer: int, count: int) -> Tensor | None:
        self._store.index_keys[layer].index_copy_(0, self.slots_T, scores.k_TD)
        return self._sparse.choose(scores, layer, count) if self._sparse.reach > count else None

    @cached_property
    def _sparse(self) -> SparseReader:
        layout = self._layout
        return SparseReader(self._store, layout.blocks[layout.rows], layout.starts, layout.counts)

    def _masked_groups(self, window: int | None, heads_per_kv: int) -> list[BlockGroup]:
        """Built for the first layer with this window and this many query heads for each key head."""
        kind = window, heads_per_kv
        if kind not in self._masked:
            self._masked[kind] = self._block_groups(np.arange(len(self._layout.rows)), *kind)
        return self._masked[kind]

    def _direct_group(self, short: Bools) -> DirectGroup | None:
        if short.all():
            return DirectGroup(self._store, self._layout, None)
        tokens = np.flatnonzero(np.repeat(short, self._layout.counts))
        return DirectGroup(self._store, self._layout, tokens) if len(tokens) else None

    def _dense_group(self, dense: DenseCache, alone: Bools) -> DenseGroup | None:
        layout, tokens = self._layout, None
        if not alone.any():
            return None
        if not alone.all():
            tokens = torch.from_numpy((np.cumsum(layout.counts) - 1)[alone])
        return dense.group(layout.rows[alone], layout.blocks, layout.starts[alone], tokens, self._heads_per_kv)

    def _block_groups(self, members: Ints, window: int | None, heads_per_kv: int) -> list[BlockGroup]:
        counts, starts = self._layout.counts[members], self._layout.starts[members]
        kinds = _bucket(counts, 1, 2) * 64 + _bucket(starts + counts, 128, 4)
        return [self._block_group(members[kinds == kind], window, heads_per_kv) for kind in np.unique(kinds)]

    def _block_group(self, members: Ints, window: int | None, heads_per_kv: int) -> BlockGroup:
        layout, store, device = self._layout, self._store, self._store.device
        counts, starts = layout.counts[members], layout.starts[members]
        batch, queries = len(members), int(counts.max())
        first = 0 if window is None else max(0, int(starts.min()) + 1 - window) // store.block_size
        last = -(-int((starts + counts).max()) // store.block_size)
        blocks = to_device(layout.blocks[layout.rows[members], first:last].reshape(-1), device)
        # A padded query repeats its sequence's last one: it always sees a key, and is dropped afterwards.
        steps = np.minimum(np.arange(queries)[None, :], counts[:, None] - 1)
        keys = torch.arange(first * store.block_size, last * store.block_size, device=device)
        seen = to_device(starts[:, None] + steps, device)
        padded = queries * batch != int(counts.sum())
        tokens = ends = None
        if padded or batch < len(layout.counts):
            firsts = (np.cumsum(layout.counts) - layout.counts)[members]
            tokens = to_device((firsts[:, None] + steps).reshape(-1), device)
        if self._spans is not None:
            last_T = self._spans.last_T
            ends = (last_T if tokens is None else last_T[tokens]).view(batch, queries)
        mask = visible_mask(seen, keys, window, heads_per_kv, store.dtype, ends)
        group = BlockGroup(store, batch, queries, blocks, mask, tokens)
        if padded:
            group.valid = to_device(np.flatnonzero(np.arange(queries) < counts[:, None]), device)
        return group


def run_whole(decoder: CpuDecoder, tokens: list[int], layout: StepLayout, wanted: Ints | None) -> Tensor | None:
    """Hidden states of the tokens `wanted`, or all. None where the step has more than is read in place."""
    if len(tokens) > len(layout.rows) and layout.counts.max() > _SHORT:
        return None
    return decoder(tokens, layout.positions_T, layout.token_rows, wanted)


def _bucket(lengths: Ints, floor: int, base: int) -> Ints:
    """Lengths above `floor` with the same number differ by less than a factor of `base`."""
    scaled = np.ceil(np.log(np.maximum(lengths / floor, 1.0)) / np.log(base) - 1e-9)
    return np.asarray(scaled, dtype=np.int64)
