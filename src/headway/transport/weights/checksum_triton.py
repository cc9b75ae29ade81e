"""The checksum in one pass over an accelerator's memory, for many tensors in one launch."""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from headway.transport.weights.checksum import MIX, ROW, ROW_BYTES, STEP
from headway.transport.weights.checksum_device import Parts, aligned, keys_on, signed, words_of

Ints = NDArray[np.int64]

_TILE = 4
"""Rows that a program reads at a time."""
_ROUNDS = 32
"""Tiles that a program reads one after the other."""
_WARPS = 4
_FIELDS = 8


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _scrambled(x, row, STEP: tl.constexpr, MIX_0: tl.constexpr, MIX_1: tl.constexpr):  # type: ignore[no-untyped-def]
    x = x + (row + 1) * STEP
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_0
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_1
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["parts"])  # type: ignore[untyped-decorator]  # triton has no types
def _count(  # type: ignore[no-untyped-def]
    table, keys, out, parts,
    FIELDS: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr, ROUNDS: tl.constexpr,
    STEP: tl.constexpr, MIX_0: tl.constexpr, MIX_1: tl.constexpr,
):  # fmt: skip
    """`table` has `FIELDS` numbers for each part (see `_table`), then every program's part. `out` is zero before."""
    program = tl.program_id(0).to(tl.int64)
    part = tl.load(table + parts * FIELDS + program)
    entry = table + part * FIELDS
    words = tl.load(entry).to(tl.pointer_type(tl.int64))
    count, before, number = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    first, last, rows = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    start = (program - tl.load(entry + 7)) * ROUNDS * TILE
    place = tl.arange(0, ROW)[None, :]
    # Numbers that are seen to have 32 bits are multiplied in one instruction.
    low_key = tl.load(keys + place).to(tl.int64) & 0xFFFFFFFF
    high_key = tl.load(keys + ROW + place).to(tl.int64) & 0xFFFFFFFF
    plain_total = tl.zeros((TILE,), dtype=tl.int64)
    keyed_total = tl.zeros((TILE,), dtype=tl.int64)
    here = tl.zeros((TILE,), dtype=tl.int32)
    sums = out + part * 6
    for turn in range(ROUNDS):
        row = start + turn * TILE + tl.arange(0, TILE).to(tl.int64)
        at = row[:, None] * ROW - before + place
        word = tl.load(words + at, mask=(at >= 0) & (at < count), other=0)
        plain = tl.sum(word, axis=1)
        keyed = tl.sum((word & 0xFFFFFFFF) * low_key + ((word >> 32) & 0xFFFFFFFF) * high_key, axis=1)
        complete = (row >= first) & (row < last)
        plain_total += tl.where(complete, _scrambled(plain, number + row, STEP, MIX_0, MIX_1), 0)
        keyed_total += tl.where(complete, _scrambled(keyed, number + row, STEP, MIX_0, MIX_1), 0)
        tl.store(sums + 2 + here, plain, mask=row == 0)
        tl.store(sums + 3 + here, keyed, mask=row == 0)
        tl.store(sums + 4 + here, plain, mask=row == rows - 1)
        tl.store(sums + 5 + here, keyed, mask=row == rows - 1)
    tl.atomic_add(sums, tl.sum(plain_total, axis=0))
    tl.atomic_add(sums + 1, tl.sum(keyed_total, axis=0))


def count_by_triton(parts: Parts) -> Tensor:
    """As `checksum_device.count_by_torch` for each of `parts`, all on one device."""
    device = parts.data[0].device
    pairs = zip(parts.data, parts.offsets, strict=True)
    memory = [data if aligned(data, offset) else words_of(data, offset) for data, offset in pairs]
    table, programs = _table([data.data_ptr() for data in memory], np.array(parts.offsets), np.array(parts.sizes))
    out = torch.zeros((len(memory), 6), dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        _count[(programs,)](
            torch.from_numpy(table).to(device, non_blocking=True),
            keys_on(device),
            out,
            len(memory),
            FIELDS=_FIELDS,
            ROW=ROW,
            TILE=_TILE,
            ROUNDS=_ROUNDS,
            STEP=signed(STEP),
            MIX_0=signed(MIX[0]),
            MIX_1=signed(MIX[1]),
            num_warps=_WARPS,
        )
    return out


def _table(addresses: list[int], offsets: Ints, sizes: Ints) -> tuple[Ints, int]:
    """For each part: address, words, words that are missing of its first row, that row's number, the complete rows, all
    rows, its first program. Then each program's part. And how many programs there are."""
    ends = offsets + sizes
    number = offsets // ROW_BYTES
    rows = -(-ends // ROW_BYTES) - number
    first = (offsets % ROW_BYTES > 0).astype(np.int64)
    last = np.maximum(first, rows - (ends % ROW_BYTES > 0))
    words = (offsets % 8 + sizes + 7) // 8
    programs = -(-rows // (_TILE * _ROUNDS))
    starts = np.cumsum(programs) - programs
    fields = [np.array(addresses), words, offsets % ROW_BYTES // 8, number, first, last, rows, starts]
    owners = np.repeat(np.arange(len(programs)), programs)
    return np.concatenate([np.stack(fields, axis=1).ravel(), owners]), len(owners)
