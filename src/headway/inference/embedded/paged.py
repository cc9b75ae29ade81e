"""Attention over paged blocks: new keys and values are written to the cache, queries attend over what is there."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


class KvStore:
    """Keys and values of all layers, (slots, kv heads, head dim) each; slot = block x block size + offset."""

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (layers, num_blocks * block_size, kv_heads, head_dim)
        self.keys = list(torch.zeros(shape, dtype=dtype, device=device))
        self.values = list(torch.zeros(shape, dtype=dtype, device=device))

    @staticmethod
    def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * kv_heads * head_dim * dtype.itemsize


@dataclass(slots=True)
class Group:
    """Sequences of similar query and context length, attended in one padded call.

    `tokens` are the packed places of the (batch x queries) padded queries, None where they are all tokens in
    order; `valid` are the padded places that are real, None where all are. `mask` is added to the scores.
    """

    batch: int
    queries: int
    blocks: Tensor
    mask: Tensor | None
    tokens: Tensor | None = None
    valid: Tensor | None = None

    def attend(self, q_NHD: Tensor, keys: Tensor, values: Tensor, block_size: int) -> Tensor:
        """(batch x queries, H, D) padded queries over this group's blocks."""
        _, heads, dim = q_NHD.shape
        kv_heads = keys.shape[1]
        # Query heads that share a kv head become rows of one query matrix, so that keys need no repeating.
        q = q_NHD.view(self.batch, self.queries, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            q.reshape(self.batch, kv_heads, -1, dim),
            self._gather(keys, block_size),
            self._gather(values, block_size),
            attn_mask=self.mask,
        )
        out = out.view(self.batch, kv_heads, heads // kv_heads, self.queries, dim)
        return out.permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)

    def _gather(self, cache: Tensor, block_size: int) -> Tensor:
        _, kv_heads, dim = cache.shape
        picked = cache.view(-1, block_size * kv_heads * dim).index_select(0, self.blocks)
        return picked.view(self.batch, -1, kv_heads, dim).transpose(1, 2)


class PagedPlan:
    """An `AttentionPlan`: built once per step from where its tokens are, shared by all layers."""

    def __init__(self, store: KvStore, slots_T: Tensor, groups: list[Group]) -> None:
        self._store = store
        self.slots_T = slots_T
        self._groups = groups

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> Tensor:
        store = self._store
        keys, values = store.keys[layer], store.values[layer]
        keys.index_copy_(0, self.slots_T, k_TKD)
        values.index_copy_(0, self.slots_T, v_TKD)
        if len(self._groups) == 1 and self._groups[0].tokens is None:
            return self._groups[0].attend(q_THD, keys, values, store.block_size)
        out = torch.empty_like(q_THD)
        for group in self._groups:
            assert group.tokens is not None
            padded = group.attend(q_THD.index_select(0, group.tokens), keys, values, store.block_size)
            if group.valid is None:
                out.index_copy_(0, group.tokens, padded)
            else:
                out.index_copy_(0, group.tokens[group.valid], padded[group.valid])
        return out


def make_plan(
    store: KvStore, tables: Ints, starts: Ints, counts: Ints, positions_T: Ints, *, heads_per_kv: int
) -> PagedPlan:
    """`tables[i]` are the blocks of sequence i, which runs `counts[i]` tokens from position `starts[i]` on."""
    size = store.block_size
    owner = np.repeat(np.arange(len(counts)), counts)
    slots = tables[owner, positions_T // size] * size + positions_T % size
    firsts = np.cumsum(counts) - counts
    ends = starts + counts
    kinds = _bucket(counts, 2) * 64 + _bucket(ends, 4)
    groups = []
    for kind in np.unique(kinds):
        members = np.flatnonzero(kinds == kind)
        whole = len(members) == len(counts)
        groups.append(_make_group(store, tables, starts, counts, firsts, members, whole, heads_per_kv))
    return PagedPlan(store, _to(store, slots), groups)


def _make_group(
    store: KvStore,
    tables: Ints,
    starts: Ints,
    counts: Ints,
    firsts: Ints,
    members: Ints,
    whole: bool,
    heads_per_kv: int,
) -> Group:
    size = store.block_size
    counts, starts, firsts = counts[members], starts[members], firsts[members]
    batch, queries = len(members), int(counts.max())
    num_blocks = -(-int((starts + counts).max()) // size)
    blocks = _to(store, tables[members, :num_blocks].reshape(-1))
    # A padded query repeats its sequence's last one: it always sees a key, and is dropped afterwards.
    steps = np.minimum(np.arange(queries)[None, :], counts[:, None] - 1)
    padded = queries * batch != int(counts.sum())
    seen = _to(store, starts[:, None] + steps)
    hidden = torch.arange(num_blocks * size, device=seen.device) > seen[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=store.keys[0].dtype, device=seen.device).masked_fill_(hidden, -torch.inf)
    mask = mask.unsqueeze(1).expand(-1, heads_per_kv, -1, -1)
    mask = mask.reshape(batch, 1, heads_per_kv * queries, -1) if queries > 1 else mask.transpose(1, 2)
    if whole and not padded:
        return Group(batch, queries, blocks, mask)
    valid = np.flatnonzero((np.arange(queries)[None, :] < counts[:, None]).reshape(-1)) if padded else None
    tokens = _to(store, (firsts[:, None] + steps).reshape(-1))
    return Group(batch, queries, blocks, mask, tokens, None if valid is None else _to(store, valid))


def _bucket(lengths: Ints, base: int) -> Ints:
    """Lengths with the same number differ by less than a factor of `base`, short ones apart."""
    floor = 1 if base == 2 else 128
    scaled = np.ceil(np.log(np.maximum(lengths / floor, 1.0)) / np.log(base) - 1e-9)
    return np.asarray(scaled, dtype=np.int64)


def _to(store: KvStore, values: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(store.keys[0].device, non_blocking=True)
