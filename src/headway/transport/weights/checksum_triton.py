"""The checksum in one pass over an accelerator's memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.transport.weights.checksum import MIX, ROW, STEP
from headway.transport.weights.checksum_device import Extent, keys_on, signed

_TILE = 8
"""Rows that a program reads at a time."""
_PROGRAMS = 1056
"""Programs at most: eight for every multiprocessor of a large GPU."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _scrambled(x, row, STEP: tl.constexpr, MIX_0: tl.constexpr, MIX_1: tl.constexpr):  # type: ignore[no-untyped-def]
    x = x + (row + 1) * STEP
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_0
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_1
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(  # type: ignore[untyped-decorator]  # triton has no types
    do_not_specialize=["count", "before", "number", "first", "last", "rows", "rounds"]
)
def _count(  # type: ignore[no-untyped-def]
    words, keys, out, count, before, number, first, last, rows, rounds,
    ROW: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, MIX_0: tl.constexpr, MIX_1: tl.constexpr,
):  # fmt: skip
    """`before` words are missing of the first row, whose number is `number`; rows `first .. last` are complete. `out`
    is zero before."""
    place = tl.arange(0, ROW)[None, :]
    low_key = tl.load(keys + place)
    high_key = tl.load(keys + ROW + place)
    plain_total = tl.zeros((TILE,), dtype=tl.int64)
    keyed_total = tl.zeros((TILE,), dtype=tl.int64)
    program = tl.program_id(0).to(tl.int64)
    for turn in range(rounds):
        row = (program * rounds + turn) * TILE + tl.arange(0, TILE).to(tl.int64)
        at = row[:, None] * ROW - before + place
        word = tl.load(words + at, mask=(at >= 0) & (at < count), other=0)
        plain = tl.sum(word, axis=1)
        keyed = tl.sum((word & 0xFFFFFFFF) * low_key + ((word >> 32) & 0xFFFFFFFF) * high_key, axis=1)
        complete = (row >= first) & (row < last)
        plain_total += tl.where(complete, _scrambled(plain, number + row, STEP, MIX_0, MIX_1), 0)
        keyed_total += tl.where(complete, _scrambled(keyed, number + row, STEP, MIX_0, MIX_1), 0)
        here = tl.zeros((TILE,), dtype=tl.int32)
        tl.store(out + 2 + here, plain, mask=row == 0)
        tl.store(out + 3 + here, keyed, mask=row == 0)
        tl.store(out + 4 + here, plain, mask=row == rows - 1)
        tl.store(out + 5 + here, keyed, mask=row == rows - 1)
    tl.atomic_add(out, tl.sum(plain_total, axis=0))
    tl.atomic_add(out + 1, tl.sum(keyed_total, axis=0))


def count_words(words: Tensor, extent: Extent) -> Tensor:
    """As `checksum_device.count_by_torch`."""
    out = torch.zeros(6, dtype=torch.int64, device=words.device)
    tiles = triton.cdiv(extent.rows, _TILE)
    rounds = triton.cdiv(tiles, _PROGRAMS)
    with torch.cuda.device(words.device):
        _count[(triton.cdiv(tiles, rounds),)](
            words,
            keys_on(words.device),
            out,
            len(words),
            extent.before,
            extent.number,
            extent.complete.start,
            extent.complete.stop,
            extent.rows,
            rounds,
            ROW=ROW,
            TILE=_TILE,
            STEP=signed(STEP),
            MIX_0=signed(MIX[0]),
            MIX_1=signed(MIX[1]),
            num_warps=8,
        )
    return out
