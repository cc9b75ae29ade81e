"""Attention of a step's queries over a paged cache, read in place through a table of blocks.

The work is cut into tiles: a few neighbouring queries of one sequence with all heads that share a kv head, so that keys
and values are read once for all of them. A decoding sequence is a tile of one query, or several that have a part of its
keys each: the last of them to be done puts together what all have found.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.attention.kv_cache import CachedHeads
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.paged import Tiles

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LEAST = 16
"""The smallest side of a matrix product in Triton."""
_MANY = 2048
"""Programs from which on larger portions are faster."""
_RANGE: tl.constexpr = tl.constexpr(2.0**14)
"""Of float16, which ends at twice that."""
_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
_UNPACK: tl.constexpr = tl.constexpr("""{
    .reg .b32 both;
    .reg .b16 two, none;
    prmt.b32 both, $2, 0, 0x4420;
    mov.b32 {two, none}, both;
    cvt.rn.f16x2.e4m3x2 $0, two;
    prmt.b32 both, $2, 0, 0x4431;
    mov.b32 {two, none}, both;
    cvt.rn.f16x2.e4m3x2 $1, two;
}""")
"""Bytes 0 and 2, then bytes 1 and 3, of two pairs."""


@triton.jit
def _halves(x):  # type: ignore[no-untyped-def]
    """Split the columns of a matrix into the even and the odd ones."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def _unpack(pairs, like):  # type: ignore[no-untyped-def]
    """Turn pairs of FP8 numbers, read as 16-bit integers, into the even columns and the odd ones. What is read in 16
    bits comes to the products as their hardware wants it; bytes would be collected one by one."""
    if _INTERPRETED:
        even = pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(like.dtype)
        odd = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(like.dtype)
    else:
        # The same: the compiler would take five instructions for two numbers.
        even, odd = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        even = even.to(like.dtype)
        odd = odd.to(like.dtype)
    return even, odd


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _put_together(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    parts, stats, part, num_parts, heads, DIM: tl.constexpr, real, d, WIDTH: tl.constexpr
):
    """Add up the parts of a tile's heads, which are at `part` and, for each other part, `heads` further on."""
    best = tl.full(part.shape, float("-inf"), tl.float32)
    total = tl.zeros(part.shape, tl.float32)
    acc = tl.zeros([part.shape[0], WIDTH], tl.float32)
    mask = real[:, None] & (d < DIM)[None, :]
    for _ in range(num_parts):
        # Past the first cache, which may hold what was here before another program wrote it.
        own_best = tl.load(stats + part * 2, mask=real, other=0.0, cache_modifier=".cg")
        own_total = tl.load(stats + part * 2 + 1, mask=real, other=1.0, cache_modifier=".cg")
        own = tl.load(parts + part[:, None] * DIM + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(best, own_best)
        fade, weight = tl.exp2(best - higher), tl.exp2(own_best - higher)
        total = total * fade + own_total * weight
        acc = acc * fade[:, None] + own * weight[:, None]
        best = higher
        part += heads
    return acc / total[:, None]


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _attend_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    q, keys, values, key_scales, value_scales, table, rows, tokens, positions, counts, sizes, numbers, places, arrived,
    sinks, out, parts, stats, scale, q_stride, kv_stride, table_stride, heads, GROUP: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    FP8: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    # Heads first: programs that run at the same time read neighbouring parts of the same slots.
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    # All at once: none waits for another.
    count = tl.load(counts + tile).to(tl.int32)
    position = tl.load(positions + tile).to(tl.int32)
    first = tl.load(tokens + tile).to(tl.int64)
    blocks = table + tl.load(rows + tile).to(tl.int64) * table_stride
    low = 0
    if WINDOW is not None:
        low = tl.maximum(position + 1 - WINDOW, 0)
    if SPLIT:
        size = tl.load(sizes + tile).to(tl.int32)
        number = tl.load(numbers + tile).to(tl.int32)
        place = tl.load(places + tile).to(tl.int64)
        low = number * size
    if count == 0:
        return

    m = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    n = tl.arange(0, KEYS)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    real = query < count
    reach = position + query
    q_at = (first + query)[:, None] * q_stride + head[:, None] * DIM + d[None, :]
    q_md = tl.load(q + q_at, mask=real[:, None] & (d < DIM)[None, :], other=0.0)
    if FP8:
        # FP8 is exact in float16, too, and is turned into it in half the time of bfloat16.
        q_md = q_md.to(tl.float32 if q_md.dtype == tl.float32 else tl.float16)
        q_even, q_odd = _halves(q_md)
        e = tl.arange(0, WIDTH // 2)

    end = position + count
    high = tl.minimum(end, low + size) if SPLIT else end
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        # Once for all parts.
        best = tl.where(number == 0, sink, best) if SPLIT else sink
        total = tl.where(number == 0, 1.0, total) if SPLIT else total + 1.0
    if FP8:
        acc_even = tl.zeros([ROWS, WIDTH // 2], tl.float32)
        acc_odd = tl.zeros([ROWS, WIDTH // 2], tl.float32)
    else:
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(low, high, KEYS):
        at = start + n
        inside = at < high
        block = tl.load(blocks + at // SIZE, mask=inside, other=0).to(tl.int64)
        if FP8:
            slot = block * SIZE + at % SIZE
            pair = (slot * kv_stride + kv_head * DIM // 2)[:, None] + e[None, :]
            in_pairs = inside[:, None] & (e < DIM // 2)[None, :]
            scale_at = slot * tl.num_programs(0) + kv_head
            k_even, k_odd = _unpack(tl.load(keys + pair, mask=in_pairs, other=0), q_md)
            scores = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
            scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee")
            scores *= scale * tl.load(key_scales + scale_at, mask=inside, other=0.0)[None, :]
        else:
            slot = (block * SIZE + at % SIZE) * kv_stride + kv_head * DIM
            k_nd = tl.load(keys + slot[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
            scores = tl.dot(q_md, tl.trans(k_nd), input_precision="ieee") * scale
        if SOFTCAP is not None:
            # The hyperbolic tangent, of which an infinite power makes 1 or -1.
            scores = (SOFTCAP * _LOG2_E) * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * _LOG2_E / SOFTCAP))))
        visible = inside[None, :] & (at[None, :] <= reach[:, None])
        if WINDOW is not None:
            visible = visible & (at[None, :] > reach[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # A query that sees none of these keys has no maximum to subtract.
        ground = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - ground[:, None])
        fade = tl.exp2(best - ground)
        total = total * fade + tl.sum(weights, 1)
        if FP8:
            v_scale = tl.load(value_scales + scale_at, mask=inside, other=0.0)
            # Weights times scales, so that the largest uses float16's range: the smallest must not vanish.
            ceiling = tl.max(v_scale, 0) / _RANGE
            shares = (weights * (v_scale / ceiling)[None, :]).to(q_md.dtype)
            v_even, v_odd = _unpack(tl.load(values + pair, mask=in_pairs, other=0), q_md)
            acc_even = acc_even * fade[:, None] + tl.dot(shares, v_even, input_precision="ieee") * ceiling
            acc_odd = acc_odd * fade[:, None] + tl.dot(shares, v_odd, input_precision="ieee") * ceiling
        else:
            v_nd = tl.load(values + slot[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
            acc = tl.dot(weights.to(v_nd.dtype), v_nd, acc * fade[:, None], input_precision="ieee")
        best = higher
    if FP8:
        acc = tl.reshape(tl.join(acc_even, acc_odd), [ROWS, WIDTH])

    mask = real[:, None] & (d < DIM)[None, :]
    own = (first + query) * heads + head
    if SPLIT:
        if size < end:
            part = (place + number) * heads + head
            tl.store(parts + part[:, None] * DIM + d[None, :], acc, mask=mask)
            tl.store(stats + part * 2, best, mask=real)
            tl.store(stats + part * 2 + 1, total, mask=real)
            num_parts = tl.cdiv(end, size)
            arrival = arrived + place * tl.num_programs(0) + kv_head
            # All threads have stored before one of them says so.
            tl.debug_barrier()
            if tl.atomic_add(arrival, 1, sem="acq_rel") == num_parts - 1:
                tl.store(arrival, 0)
                mixed = _put_together(parts, stats, place * heads + head, num_parts, heads, DIM, real, d, WIDTH)
                tl.store(out + own[:, None] * DIM + d[None, :], mixed, mask=mask)
        else:
            tl.store(out + own[:, None] * DIM + d[None, :], acc / total[:, None], mask=mask)
    else:
        tl.store(out + own[:, None] * DIM + d[None, :], acc / total[:, None], mask=mask)


class Portion(NamedTuple):
    """The keys that a program reads at a time, by so many warps. With 5 stages it loads a portion while it computes
    with another, for which it needs twice the memory; with 3, other programs load meanwhile. With fewer registers for a
    thread there is room for more of them."""

    keys: int
    warps: int
    stages: int = 3
    registers: int | None = None


def paged_attention(
    q_THD: Tensor,
    keys: CachedHeads,
    values: CachedHeads,
    table: Tensor,
    tiles: Tiles,
    layer: AttentionLayer,
    block_size: int,
    out: Tensor,
) -> None:
    """Decoding wants many small programs. A window is read by one of them."""
    heads, dim = q_THD.shape[1:]
    if layer.window is not None:
        tiles = tiles.whole
    kv_heads, fp8, splits = keys.numbers.shape[1], keys.scales is not None, tiles.splits
    group = heads // kv_heads
    # Powers of 2 are faster than those of e.
    scale = (dim**-0.5 if layer.scale is None else layer.scale) * (1 if layer.softcap else _LOG2_E.value)
    width = max(2 * _LEAST if fp8 else _LEAST, triton.next_power_of_2(dim))
    portion = _portion(tiles, kv_heads, width, fp8=fp8, half=q_THD.dtype is not torch.float32)
    parts = stats = None
    cut = (None, None, None, None) if splits is None else (splits.sizes, splits.numbers, splits.places, splits.arrived)
    if splits is not None:
        places = len(splits.arrived)
        parts = torch.empty((places, heads, dim), dtype=torch.float32, device=out.device)
        stats = torch.empty((places, heads, 2), dtype=torch.float32, device=out.device)
    k_numbers, v_numbers = (each.view(torch.int16) if fp8 else each for each in (keys.numbers, values.numbers))
    _attend_kernel[(kv_heads, len(tiles.rows))](
        q_THD, k_numbers, v_numbers, keys.scales, values.scales, table, tiles.rows, tiles.tokens, tiles.positions,
        tiles.counts, *cut, layer.sinks, out, parts, stats, scale,
        q_THD.stride(0), k_numbers.stride(0), table.stride(0), heads, GROUP=group, DIM=dim, SIZE=block_size,
        SPLIT=splits is not None, ROWS=max(_LEAST, triton.next_power_of_2(tiles.queries * group)), WIDTH=width,
        KEYS=portion.keys, FP8=fp8, WINDOW=layer.window, SOFTCAP=layer.softcap,
        num_stages=portion.stages, num_warps=portion.warps, maxnreg=portion.registers,
    )  # fmt: skip


def _portion(tiles: Tiles, kv_heads: int, width: int, *, fp8: bool, half: bool) -> Portion:
    """The best on an H200 (`benchmarks/gpu_parts/attention_tiles.py`)."""
    decoding = tiles.queries == 1
    # In float32 products are unrolled into single multiplications, so that large tiles would be very long programs.
    if not half:
        return Portion(_LEAST, 4)
    if decoding and width <= 64:
        return Portion(32, 1)
    if decoding and width == 128 and fp8:
        return Portion(128, 4, 5)
    if decoding and width == 128:
        return Portion(128, 4) if len(tiles.rows) * kv_heads >= _MANY else Portion(64, 4, registers=128)
    return Portion(32 if width > 128 else 64, 4)
