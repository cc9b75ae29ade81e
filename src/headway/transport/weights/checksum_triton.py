"""The checksum in one pass over an accelerator's memory, for many tensors in one launch."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.transport.weights.checksum import MIX, ROW, STEP
from headway.transport.weights.checksum_device import Extent, keys_on, signed

_TILE = 4
"""Rows that a program reads at a time."""
_ROUNDS = 16
"""Tiles that a program reads one after the other."""
_WARPS = 8
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
    low_key = tl.load(keys + place)
    high_key = tl.load(keys + ROW + place)
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


def count_by_triton(parts: list[tuple[Tensor, Extent]]) -> Tensor:
    """As `checksum_device.count_by_torch` for each of `parts`, all on one device."""
    device = parts[0][0].device
    table, programs = _table(parts)
    out = torch.zeros((len(parts), 6), dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        _count[(programs,)](
            torch.from_numpy(table).to(device, non_blocking=True),
            keys_on(device),
            out,
            len(parts),
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


def _table(parts: list[tuple[Tensor, Extent]]) -> tuple[np.ndarray, int]:
    """For each part: address, words, words that are missing of its first row, that row's number, the complete rows, all
    rows, its first program. Then each program's part. And how many programs there are."""
    programs = np.array([-(-extent.rows // (_TILE * _ROUNDS)) for _, extent in parts])
    starts = np.cumsum(programs) - programs
    fields = [
        (w.data_ptr(), len(w), e.before, e.number, e.complete.start, e.complete.stop, e.rows, start)
        for (w, e), start in zip(parts, starts.tolist(), strict=True)
    ]
    owners = np.repeat(np.arange(len(parts)), programs)
    return np.concatenate([np.array(fields, dtype=np.int64).ravel(), owners.astype(np.int64)]), len(owners)
