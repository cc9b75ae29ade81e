"""Attention of a step's queries over a paged cache, read in place through a table of blocks.

Position p of the sequence in row r is in slot `table[r, p // block_size] * block_size + p % block_size`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.models.ops.attention.kv_cache import CachedHeads
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.masked import masked_attention, visible_mask
from headway.models.ops.native.library import dense_rows, kernels
from headway.models.ops.registry import Op, in_c, in_triton

_PLAIN = AttentionLayer(0)


@dataclass(frozen=True, slots=True)
class KeySplits:
    """Tiles of one query that are parts of sequences: tile i has at most `sizes[i]` keys of its own, from
    `numbers[i] * sizes[i]` on; one of as many keys as there are is whole. What parts have found is put together by the
    last of them. Until then it stays in a buffer, that of the first part in place `places[i]`; `arrived` (places, kv
    heads), int32, counts the parts that are done: zeros before a call and behind it. `firsts` are the tiles' counts
    where nothing is split: 0 but for the first part of a sequence."""

    firsts: Tensor
    sizes: Tensor
    numbers: Tensor
    places: Tensor
    arrived: Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """A few neighbouring queries of one sequence each: tile i are `counts[i]` queries, at most `queries`, from packed
    place `tokens[i]` on; the first stands at `positions[i]` of the sequence in row `rows[i]` of the table. A count of
    0 is an empty tile. Tiles of one query may be cut along their keys (`splits`)."""

    rows: Tensor
    tokens: Tensor
    positions: Tensor
    counts: Tensor
    queries: int
    splits: KeySplits | None = None

    @classmethod
    def of(cls, fields: Tensor, queries: int) -> "Tiles":
        """Tiles whose first four fields are rows of one tensor."""
        rows, tokens, positions, counts = fields
        return cls(rows, tokens, positions, counts, queries)

    @classmethod
    def split(cls, fields: Tensor, arrived: Tensor) -> "Tiles":
        """Tiles of one query, whose first four fields and the first four of their splits are rows of one tensor."""
        rows, tokens, positions, counts, firsts, sizes, numbers, places = fields
        return cls(rows, tokens, positions, counts, 1, KeySplits(firsts, sizes, numbers, places, arrived))

    @property
    def whole(self) -> "Tiles":
        """The same without splits."""
        return self if self.splits is None else replace(self, counts=self.splits.firsts, splits=None)


@Op
def paged_attention(
    q_THD: Tensor,
    keys: CachedHeads,
    values: CachedHeads,
    table: Tensor,
    tiles: Tiles,
    layer: AttentionLayer,
    block_size: int,
    out_THD: Tensor,
) -> None:
    """Attention of the tiles' queries as the layer wants it, into `out`; other rows of it stay as they are."""
    tiles = tiles.whole
    for row, first, start, count in torch.stack([tiles.rows, tiles.tokens, tiles.positions, tiles.counts]).T.tolist():
        if count:
            own = slice(first, first + count)
            out_THD[own] = _attend(q_THD[own], keys, values, table[row], start, block_size, layer)


@Op
def paged_token_attention(
    q_THD: Tensor,
    keys: CachedHeads,
    values: CachedHeads,
    table: Tensor,
    rows_T: Tensor,
    positions_T: Tensor,
    block_size: int,
    longest: int,
) -> Tensor:
    """Token t attends over places 0 to `positions[t]` of the sequence in row `rows[t]`. `longest` is the largest
    position."""
    each = zip(torch.split(q_THD, 1), rows_T.tolist(), positions_T.tolist(), strict=True)
    return torch.cat([_attend(q, keys, values, table[row], at, block_size, _PLAIN) for q, row, at in each])


def _attend(
    q_nHD: Tensor,
    keys: CachedHeads,
    values: CachedHeads,
    blocks: Tensor,
    start: int,
    block_size: int,
    layer: AttentionLayer,
) -> Tensor:
    """Queries that stand at `start` and behind it, over the places that they see."""
    first = 0 if layer.window is None else max(0, start + 1 - layer.window)
    places = torch.arange(first, start + len(q_nHD), device=q_nHD.device)
    slots = blocks[places // block_size].long() * block_size + places % block_size
    k, v = (heads.read(slots, q_nHD.dtype).transpose(0, 1).unsqueeze(0) for heads in (keys, values))
    heads_per_kv = q_nHD.shape[1] // k.shape[1]
    mask = visible_mask(places[None, start - first :], places, layer.window, heads_per_kv, q_nHD.dtype)
    return masked_attention(q_nHD[None], k, v, mask, layer)[0]


def _unscaled_in_c(q_THD: Tensor, keys: CachedHeads, *_: Any) -> bool:
    return in_c(q_THD) and keys.scales is None


@paged_token_attention.backend("c", takes=_unscaled_in_c)
def _paged_token_attention_c(
    q_THD: Tensor,
    keys: CachedHeads,
    values: CachedHeads,
    table: Tensor,
    rows_T: Tensor,
    positions_T: Tensor,
    block_size: int,
    longest: int,
) -> Tensor:
    q_THD = dense_rows(q_THD)
    out = torch.empty(q_THD.shape)
    tokens, heads, size = q_THD.shape
    failed = kernels().attend_cache(
        q_THD.data_ptr(), q_THD.stride(0), keys.numbers.data_ptr(), values.numbers.data_ptr(), table.data_ptr(),
        table.stride(0), rows_T.data_ptr(), positions_T.data_ptr(), tokens, heads, keys.numbers.shape[1], size,
        block_size, longest, out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for the scores of attention")
    return out


paged_attention.backend("triton", takes=in_triton)("headway.models.ops.triton.paged_attention:paged_attention")
