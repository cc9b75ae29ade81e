"""The checksum in one pass over an accelerator's memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.transport.weights.checksum import MIX, ROW, STEP
from headway.transport.weights.checksum_device import HEADER, signed

_TILE = 4
"""Rows that a program reads at a time."""
_PROGRAMS = 528
"""Programs at most, for each ends with a row of atomic operations: several for every multiprocessor."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _count(  # type: ignore[no-untyped-def]
    words, out, count, before, number, rounds,
    ROW: tl.constexpr, TILE: tl.constexpr, HEADER: tl.constexpr,
    STEP: tl.constexpr, MIX_0: tl.constexpr, MIX_1: tl.constexpr,
):  # fmt: skip
    """`before` words are missing of the first row, whose number is `number`; `out` is zero before."""
    place = tl.arange(0, ROW)[None, :]
    columns = tl.zeros((TILE, ROW), dtype=tl.int64)
    totals = tl.zeros((TILE,), dtype=tl.int64)
    program = tl.program_id(0).to(tl.int64)
    for turn in range(rounds):
        row = (program * rounds + turn) * TILE + tl.arange(0, TILE).to(tl.int64)
        start = row * ROW - before
        at = start[:, None] + place
        word = tl.load(words + at, mask=(at >= 0) & (at < count), other=0)
        columns = columns ^ word
        sums = tl.sum(word, axis=1)
        x = sums + (number + row + 1) * STEP
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_0
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_1
        x = x ^ ((x >> 31) & 0x1FFFFFFFF)
        complete = (start >= 0) & (start + ROW <= count)
        totals += tl.where(complete, x, 0)
        # The first row's sum and the last row's, which are scrambled elsewhere where they are not complete.
        same = tl.zeros((TILE,), dtype=tl.int32)
        tl.store(out + 1 + same, sums, mask=row == 0)
        tl.store(out + 2 + same, sums, mask=(start < count) & (start + ROW >= count))
    tl.atomic_add(out, tl.sum(totals, axis=0))
    tl.atomic_xor(out + HEADER + tl.arange(0, ROW), tl.xor_sum(columns, axis=0))


def count_words(words: Tensor, first: int) -> Tensor:
    """As `checksum_device.count_by_torch`."""
    out = torch.zeros(HEADER + ROW, dtype=torch.int64, device=words.device)
    before = first % ROW
    tiles = triton.cdiv(before + len(words), ROW * _TILE)
    rounds = triton.cdiv(tiles, _PROGRAMS)
    with torch.cuda.device(words.device):
        _count[(triton.cdiv(tiles, rounds),)](
            words, out, len(words), before, first // ROW, rounds,
            ROW=ROW, TILE=_TILE, HEADER=HEADER,
            STEP=signed(STEP), MIX_0=signed(MIX[0]), MIX_1=signed(MIX[1]), num_warps=8,
        )  # fmt: skip
    return out
