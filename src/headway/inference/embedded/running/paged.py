"""Attention over paged blocks: new keys and values are written to the cache, queries attend over what is there."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.cpu.decoder import CpuDecoder
from headway.inference.embedded.running.store import KvStore
from headway.inference.embedded.running.window import Window, WindowGroup
from headway.models import ops
from headway.models.ops.registry import in_c

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

    def attend(self, q_NHD: Tensor, layer: int) -> Tensor:
        """(batch x queries, H, D) padded queries over this group's blocks."""
        _, heads, dim = q_NHD.shape
        keys, values = self._gather(self.store.keys[layer]), self._gather(self.store.values[layer])
        kv_heads = keys.shape[1]
        # Query heads that share a kv head become rows of one query matrix, so that keys need no repeating.
        q = q_NHD.reshape(self.batch, self.queries, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            q.reshape(self.batch, kv_heads, -1, dim), keys, values, attn_mask=self.mask
        )
        out = out.view(self.batch, kv_heads, heads // kv_heads, self.queries, dim)
        return out.permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)

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


class PagedPlan:
    """An `AttentionPlan`: built once per step from where its tokens are, shared by all layers."""

    def __init__(self, store: KvStore, slots_T: Tensor, decoding: DecodeGroup | None, groups: list[BlockGroup]) -> None:
        self.slots_T = slots_T
        self._store = store
        self._decoding = decoding
        self._groups = groups

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> Tensor:
        self._store.write(layer, self.slots_T, k_TKD, v_TKD)
        decoding = self._decoding
        if decoding is not None and decoding.tokens is None:
            return decoding.attend(q_THD, k_TKD, v_TKD, layer)
        if decoding is None and len(self._groups) == 1 and self._groups[0].tokens is None:
            return self._groups[0].attend(q_THD, layer)
        out = torch.empty_like(q_THD)
        if decoding is not None:
            places = decoding.tokens
            assert places is not None
            q, k, v = (x.index_select(0, places) for x in (q_THD, k_TKD, v_TKD))
            out.index_copy_(0, places, decoding.attend(q, k, v, layer))
        for group in self._groups:
            assert group.tokens is not None
            padded = group.attend(q_THD.index_select(0, group.tokens), layer)
            if group.valid is None:
                out.index_copy_(0, group.tokens, padded)
            else:
                out.index_copy_(0, group.tokens[group.valid], padded[group.valid])
        return out


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
    return PagedPlan(store, slots, decoding, groups)


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


def _block_groups(store: KvStore, layout: Layout, members: Ints, heads_per_kv: int) -> list[BlockGroup]:
    counts, ends = layout.counts[members], (layout.starts + layout.counts)[members]
    kinds = _bucket(counts, 1, 2) * 64 + _bucket(ends, 128, 4)
    return [_block_group(store, layout, members[kinds == kind], heads_per_kv) for kind in np.unique(kinds)]


def _block_group(store: KvStore, layout: Layout, members: Ints, heads_per_kv: int) -> BlockGroup:
    whole = len(members) == len(layout.counts)
    firsts = (np.cumsum(layout.counts) - layout.counts)[members]
    counts, starts = layout.counts[members], layout.starts[members]
    batch, queries = len(members), int(counts.max())
    num_blocks = -(-int((starts + counts).max()) // store.block_size)
    blocks = to_device(store, layout.blocks[layout.rows[members], :num_blocks].reshape(-1))
    # A padded query repeats its sequence's last one: it always sees a key, and is dropped afterwards.
    steps = np.minimum(np.arange(queries)[None, :], counts[:, None] - 1)
    padded = queries * batch != int(counts.sum())
    seen = to_device(store, starts[:, None] + steps)
    hidden = torch.arange(num_blocks * store.block_size, device=seen.device) > seen[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=store.keys[0].dtype, device=seen.device).masked_fill_(hidden, -torch.inf)
    mask = mask.unsqueeze(1).expand(-1, heads_per_kv, -1, -1)
    mask = mask.reshape(batch, 1, heads_per_kv * queries, -1) if queries > 1 else mask.transpose(1, 2)
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
