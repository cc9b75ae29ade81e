"""Attention of a step's queries over a paged cache, read in place through a table of blocks.

The work is cut into tiles: a few neighbouring queries of one sequence with all heads that share a kv head, so that keys
and values are read once for all of them. A decoding sequence is a tile of one query. Where there are too few tiles to
fill a device, each is split along its keys and put together afterwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.paged_attention import Tiles

_LOG2_E = 1.4426950408889634
_LEAST = 16
"""The smallest side of a matrix product in Triton."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _attend_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    q, keys, values, table, rows, tokens, positions, counts, out, parts, stats, scale, q_stride, kv_stride,
    table_stride, heads, GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # Heads first: programs that run at the same time read neighbouring parts of the same slots.
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    count = tl.load(counts + tile).to(tl.int32)
    if count == 0:
        return
    position = tl.load(positions + tile).to(tl.int32)
    first = tl.load(tokens + tile).to(tl.int64)
    blocks = table + tl.load(rows + tile).to(tl.int64) * table_stride

    m = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    n = tl.arange(0, KEYS)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    real = query < count
    reach = position + query
    q_at = (first + query)[:, None] * q_stride + head[:, None] * DIM + d[None, :]
    q_md = tl.load(q + q_at, mask=real[:, None] & (d < DIM)[None, :], other=0.0)

    end = position + count
    share = tl.cdiv(tl.cdiv(end, SPLITS), KEYS) * KEYS
    low = split * share
    high = tl.minimum(end, low + share)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(low, high, KEYS):
        at = start + n
        inside = at < high
        block = tl.load(blocks + at // SIZE, mask=inside, other=0).to(tl.int64)
        slot = (block * SIZE + at % SIZE) * kv_stride + kv_head * DIM
        k_nd = tl.load(keys + slot[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
        scores = tl.dot(q_md, tl.trans(k_nd), input_precision="ieee") * scale
        scores = tl.where(inside[None, :] & (at[None, :] <= reach[:, None]), scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # A query that sees none of these keys has no maximum to subtract.
        ground = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - ground[:, None])
        fade = tl.exp2(best - ground)
        total = total * fade + tl.sum(weights, 1)
        v_nd = tl.load(values + slot[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
        acc = tl.dot(weights.to(v_nd.dtype), v_nd, acc * fade[:, None], input_precision="ieee")
        best = higher

    mask = real[:, None] & (d < DIM)[None, :]
    place = (first + query) * heads + head
    if SPLITS == 1:
        tl.store(out + place[:, None] * DIM + d[None, :], acc / total[:, None], mask=mask)
    else:
        part = place * SPLITS + split
        tl.store(parts + part[:, None] * DIM + d[None, :], acc, mask=mask)
        tl.store(stats + part * 2, best, mask=real)
        tl.store(stats + part * 2 + 1, total, mask=real)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _combine_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    tokens, counts, parts, stats, out, heads, DIM: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr
):
    tile = tl.program_id(0)
    if tl.load(counts + tile) == 0:
        return
    place = tl.load(tokens + tile).to(tl.int64) * heads + tl.program_id(1)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDTH)
    best = tl.load(stats + (place * SPLITS + s) * 2)
    total = tl.load(stats + (place * SPLITS + s) * 2 + 1)
    share = tl.exp2(best - tl.max(best, 0))
    at = (place * SPLITS + s)[:, None] * DIM + d[None, :]
    acc = tl.load(parts + at, mask=(d < DIM)[None, :], other=0.0)
    mixed = tl.sum(acc * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + place * DIM + d, mixed, mask=d < DIM)


def paged_attention(
    q_THD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    table: Tensor,
    tiles: Tiles,
    block_size: int,
    out: Tensor,
) -> None:
    """Decoding wants many small programs. Tiles that are split have one query each."""
    tokens, heads, dim = q_THD.shape
    kv_heads = keys_SKD.shape[1]
    group = heads // kv_heads
    # In float32 products are unrolled into single multiplications, so that large tiles would be very long programs.
    decoding, half = tiles.queries == 1, q_THD.dtype is not torch.float32
    splits, width = tiles.splits, max(_LEAST, triton.next_power_of_2(dim))
    small = decoding and half and width <= 64
    keys = _LEAST if not half else 32 if width > 128 else 128 if decoding and not small else 64
    parts = stats = out
    if splits > 1:
        parts = torch.empty((tokens, heads, splits, dim), dtype=torch.float32, device=out.device)
        stats = torch.empty((tokens, heads, splits, 2), dtype=torch.float32, device=out.device)
    _attend_kernel[(kv_heads, len(tiles.rows), splits)](
        q_THD, keys_SKD, values_SKD, table, tiles.rows, tiles.tokens, tiles.positions, tiles.counts, out, parts,
        stats, dim**-0.5 * _LOG2_E, q_THD.stride(0), keys_SKD.stride(0), table.stride(0), heads, GROUP=group, DIM=dim,
        SIZE=block_size, SPLITS=splits, ROWS=max(_LEAST, triton.next_power_of_2(tiles.queries * group)), WIDTH=width,
        KEYS=keys, num_stages=3, num_warps=2 if small else 4,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(len(tiles.rows), heads)](
            tiles.tokens, tiles.counts, parts, stats, out, heads, DIM=dim, SPLITS=splits, WIDTH=width, num_warps=1
        )
