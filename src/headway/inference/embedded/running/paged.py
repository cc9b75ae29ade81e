"""Attention over paged blocks: new keys and values are written to the cache, queries attend over what is there."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.cpu.decoder import CpuDecoder
from headway.inference.embedded.running.store import KvStore
from headway.inference.embedded.running.window import Window, WindowGroup
from headway.models import ops
from headway.models.attention import masked_attention, visible_mask
from headway.models.ops.registry import in_c
from headway.models.packed import AttentionLayer, AttentionPlan

Ints = NDArray[np.int64]

_SHORT = 64
"""Tokens of one sequence in a step up to which each is read for by itself; more are a product worth padding for."""


@dataclass(slots=True)
class BlockGroup:
    """Sequences of similar query and context length, attended in one padded call over their gathered blocks.

    `tokens` are the packed places of the (batch x queries) padded queries, None where they are all tokens in
    order; `valid` are the padded places that are real, None where all are. `mask` is added to the scores.
    """

    store: KvStore
    batch: int
    queries: int
    blocks: Tensor
    mask: Tensor
    tokens: Tensor | None = None
    valid: Tensor | None = None

    def attend(self, q_NHD: Tensor, layer: AttentionLayer) -> Tensor:
        """(batch x queries, H, D) padded queries over this group's blocks."""
        store, index = self.store, layer.index
        keys, values = self._gather(store.keys[index]), self._gather(store.values[index])
        q_BQHD = q_NHD.view(self.batch, self.queries, *q_NHD.shape[1:])
        return masked_attention(q_BQHD, keys, values, self.mask, layer).flatten(0, 1)

    def _gather(self, cache: Tensor) -> Tensor:
        _, kv_heads, dim = cache.shape
        picked = cache.view(-1, self.store.block_size * kv_heads * dim).index_select(0, self.blocks)
        return picked.view(self.batch, -1, kv_heads, dim).transpose(1, 2)


class DirectGroup:
    """Tokens whose sequences' blocks a compiled kernel reads where they are: each at its position, in its row of the
    table. `tokens` None means the whole step."""

    def __init__(self, store: KvStore, table: Ints, rows: Ints, positions: Ints, tokens: Tensor | None) -> None:
        self.tokens = tokens
        self._store = store
        self._table, self._rows, self._positions = (torch.from_numpy(x) for x in (table, rows, positions))
        self._longest = int(positions.max())

    def attend(self, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, layer: int) -> Tensor:
        store = self._store
        keys, values = store.keys[layer], store.values[layer]
        return ops.paged_token_attention(
            q_BHD, keys, values, self._table, self._rows, self._positions, store.block_size, self._longest
        )


DecodeGroup = DirectGroup | WindowGroup


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a step's tokens are: sequence i, in row `rows[i]` of the table `blocks`, runs `counts[i]` tokens from
    position `starts[i]` on. `settled[i]` says that all before that was written in earlier steps."""

    blocks: Ints
    rows: Ints
    starts: Ints
    counts: Ints
    positions_T: Ints
    settled: NDArray[np.bool_]


class PagedPlan(AttentionPlan):
    """Sequences with few tokens are `decoding`, as one group; the rest is in `groups`. Layers with a window or sinks
    have groups of their own, of all sequences."""

    def __init__(
        self,
        store: KvStore,
        layout: Layout,
        slots_T: Tensor,
        decoding: DecodeGroup | None,
        groups: list[BlockGroup],
        heads_per_kv: int,
    ) -> None:
        self.slots_T = slots_T
        self._store, self._layout, self._heads_per_kv = store, layout, heads_per_kv
        self._decoding = decoding
        self._groups = groups
        self._masked: dict[int | None, list[BlockGroup]] = {}

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer) -> Tensor:
        self._store.write(layer.index, self.slots_T, k_TKD, v_TKD)
        decoding, groups = (self._decoding, self._groups) if layer.plain else (None, self._masked_groups(layer.window))
        if decoding is not None and decoding.tokens is None:
            return decoding.attend(q_THD, k_TKD, v_TKD, layer.index)
        if decoding is None and len(groups) == 1 and groups[0].tokens is None:
            return groups[0].attend(q_THD, layer)
        out = torch.empty_like(q_THD)
        if decoding is not None:
            places = decoding.tokens
            assert places is not None
            q, k, v = (x.index_select(0, places) for x in (q_THD, k_TKD, v_TKD))
            out.index_copy_(0, places, decoding.attend(q, k, v, layer.index))
        for group in groups:
            assert group.tokens is not None
            padded = group.attend(q_THD.index_select(0, group.tokens), layer)
            if group.valid is None:
                out.index_copy_(0, group.tokens, padded)
            else:
                out.index_copy_(0, group.tokens[group.valid], padded[group.valid])
        return out

    def _masked_groups(self, window: int | None) -> list[BlockGroup]:
        if window not in self._masked:
            everyone = np.arange(len(self._layout.rows))
            self._masked[window] = _block_groups(self._store, self._layout, everyone, self._heads_per_kv, window)
        return self._masked[window]


def make_plan(store: KvStore, window: Window | None, layout: Layout, heads_per_kv: int) -> PagedPlan:
    """Where that kernel is compiled, blocks of sequences with few tokens are read in place. Otherwise decoding
    sequences use the window where there is one that fits. The rest is grouped by length."""
    rows_T, size, positions = layout.rows, store.block_size, layout.positions_T
    if len(positions) > len(rows_T):
        rows_T = np.repeat(rows_T, layout.counts)
    slots = to_device(store, layout.blocks[rows_T, positions // size] * size + positions % size)
    rest = np.arange(len(layout.rows))
    decoding: DecodeGroup | None = None
    if in_c(store.keys[0]):
        short = layout.counts <= _SHORT
        decoding = _direct_group(store, layout, rows_T, short)
        rest = np.flatnonzero(~short)
    elif window is not None:
        # What a sequence shares with another of this same step is not in the blocks yet, so no row can be filled.
        alone = (layout.counts == 1) & layout.settled
        decoding = _window_group(window, layout, alone, heads_per_kv)
        rest = rest if decoding is None else np.flatnonzero(~alone)
    groups = _block_groups(store, layout, rest, heads_per_kv) if len(rest) else []
    return PagedPlan(store, layout, slots, decoding, groups, heads_per_kv)


def run_whole(decoder: CpuDecoder, tokens: list[int], layout: Layout, wanted: Ints | None) -> Tensor | None:
    """Hidden states of the tokens `wanted`, or all. None where the step has more than is read in place."""
    rows_T = layout.rows
    if len(tokens) > len(rows_T):
        if layout.counts.max() > _SHORT:
            return None
        rows_T = np.repeat(rows_T, layout.counts)
    return decoder(tokens, layout.positions_T, rows_T, wanted)


def _direct_group(store: KvStore, layout: Layout, rows_T: Ints, short: NDArray[np.bool_]) -> DirectGroup | None:
    positions = layout.positions_T
    if short.all():
        return DirectGroup(store, layout.blocks, rows_T, positions, None)
    tokens = np.flatnonzero(np.repeat(short, layout.counts))
    if not len(tokens):
        return None
    return DirectGroup(store, layout.blocks, rows_T[tokens], positions[tokens], torch.from_numpy(tokens))


def _window_group(window: Window, layout: Layout, alone: NDArray[np.bool_], heads_per_kv: int) -> WindowGroup | None:
    if alone.all():
        return window.group(layout.rows, layout.blocks, layout.starts, None, heads_per_kv)
    single = np.flatnonzero(alone)
    if not len(single):
        return None
    tokens = torch.from_numpy((np.cumsum(layout.counts) - 1)[single])
    return window.group(layout.rows[single], layout.blocks, layout.starts[single], tokens, heads_per_kv)


def _block_groups(
    store: KvStore, layout: Layout, members: Ints, heads_per_kv: int, window: int | None = None
) -> list[BlockGroup]:
    counts, ends = layout.counts[members], (layout.starts + layout.counts)[members]
    kinds = _bucket(counts, 1, 2) * 64 + _bucket(ends, 128, 4)
    return [_block_group(store, layout, members[kinds == kind], heads_per_kv, window) for kind in np.unique(kinds)]


def _block_group(store: KvStore, layout: Layout, members: Ints, heads_per_kv: int, window: int | None) -> BlockGroup:
    whole = len(members) == len(layout.counts)
    firsts = (np.cumsum(layout.counts) - layout.counts)[members]
    counts, starts = layout.counts[members], layout.starts[members]
    batch, queries = len(members), int(counts.max())
    first = 0 if window is None else max(0, int(starts.min()) + 1 - window) // store.block_size
    last = -(-int((starts + counts).max()) // store.block_size)
    blocks = to_device(store, layout.blocks[layout.rows[members], first:last].reshape(-1))
    # A padded query repeats its sequence's last one: it always sees a key, and is dropped afterwards.
    steps = np.minimum(np.arange(queries)[None, :], counts[:, None] - 1)
    padded = queries * batch != int(counts.sum())
    seen = to_device(store, starts[:, None] + steps)
    places = torch.arange(first * store.block_size, last * store.block_size, device=seen.device)
    mask = visible_mask(seen, places, window, heads_per_kv, store.keys[0].dtype)
    if whole and not padded:
        return BlockGroup(store, batch, queries, blocks, mask)
    tokens = to_device(store, (firsts[:, None] + steps).reshape(-1))
    if not padded:
        return BlockGroup(store, batch, queries, blocks, mask, tokens)
    valid = np.flatnonzero((np.arange(queries)[None, :] < counts[:, None]).reshape(-1))
    return BlockGroup(store, batch, queries, blocks, mask, tokens, to_device(store, valid))


def _bucket(lengths: Ints, floor: int, base: int) -> Ints:
    """Lengths above `floor` with the same number differ by less than a factor of `base`."""
    scaled = np.ceil(np.log(np.maximum(lengths / floor, 1.0)) / np.log(base) - 1e-9)
    return np.asarray(scaled, dtype=np.int64)


def to_device(store: KvStore, values: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(store.device, non_blocking=True)
