"""The checksum as a Triton kernel: one pass over a GPU's memory counts and copies, for many tensors in one launch."""

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from headway.transport.weights.fingerprint import reference
from headway.transport.weights.fingerprint.reference import MIX, ROW, ROW_BYTES, STEP, UNIT, Batch, Words

Ints = NDArray[np.int64]

_TILE = 1
"""Rows that a program reads at a time. One warp has one row: then its sums need no shared memory."""
_ROUNDS = 64
"""Tiles that a program reads one after the other."""
_WARPS = 1
_FIELDS = 9


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _mix(x, row, STEP: tl.constexpr, MIX_0: tl.constexpr, MIX_1: tl.constexpr):  # type: ignore[no-untyped-def]
    x = x + (row + 1) * STEP
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_0
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_1
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _sums(word, low_key, high_key):  # type: ignore[no-untyped-def]  # triton has no types
    """The plain and the keyed sum of each row."""
    plain = tl.sum(word, axis=1)
    keyed = tl.sum((word & 0xFFFFFFFF) * low_key + ((word >> 32) & 0xFFFFFFFF) * high_key, axis=1)
    return plain, keyed


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _as_bfloat16(x, TILE: tl.constexpr, ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cast to bfloat16 and pack four elements into a word."""
    bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    even, odd = tl.split(tl.reshape(bits, (TILE, 2 * ROW, 2)))
    low, high = tl.split(tl.reshape(even | (odd << 16), (TILE, ROW, 2)))
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _words(  # type: ignore[no-untyped-def]
    source, row, left, right,
    INSIDE: tl.constexpr, CAST: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Load rows of words. Those before `left` and from `right` on are zero; where all are INSIDE, loads are wider."""
    if CAST:
        at = row[:, None] * (4 * ROW) + tl.arange(0, 4 * ROW)[None, :]
        within = (at >= 4 * left) & (at < 4 * right)
        word = _as_bfloat16(tl.load(source + at) if INSIDE else tl.load(source + at, mask=within, other=0.0), TILE, ROW)
    else:
        at = row[:, None] * ROW + tl.arange(0, ROW)[None, :]
        word = tl.load(source + at) if INSIDE else tl.load(source + at, mask=(at >= left) & (at < right), other=0)
    return word


@triton.jit(do_not_specialize=["out", "parts"])  # type: ignore[untyped-decorator]  # triton has no types
def _count_kernel(  # type: ignore[no-untyped-def]
    table, keys, out, parts,
    FIELDS: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr, ROUNDS: tl.constexpr,
    CAST: tl.constexpr, COPY: tl.constexpr, COUNT: tl.constexpr,
    STEP: tl.constexpr, MIX_0: tl.constexpr, MIX_1: tl.constexpr,
):  # fmt: skip
    """Count the parts in `table`, and copy them. It has `FIELDS` numbers for each part (see `_table`), then every
    program's part. Address `out` gets four sums for each part, of its first and of its last row where these are
    partial, then two for each program."""
    program = tl.program_id(0).to(tl.int64)
    part = tl.load(table + parts * FIELDS + program)
    entry = table + part * FIELDS
    if CAST:
        source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.float32)), 16)
    else:
        source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int64)), 16)
    target = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.int64)), 16)
    left, right, number = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    first, last, rows = tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
    start = (program - tl.load(entry + 8)) * (ROUNDS * TILE)
    end = start + ROUNDS * TILE
    place = tl.arange(0, ROW)[None, :]
    tile = tl.arange(0, TILE).to(tl.int64)
    # Numbers that are seen to have 32 bits are multiplied in one instruction.
    low_key = tl.load(keys + place).to(tl.int64) & 0xFFFFFFFF
    high_key = tl.load(keys + ROW + place).to(tl.int64) & 0xFFFFFFFF
    plain_total = tl.zeros((TILE,), dtype=tl.int64)
    keyed_total = tl.zeros((TILE,), dtype=tl.int64)
    # An address of few bits comes as a narrower number.
    sums = out.to(tl.int64).to(tl.pointer_type(tl.int64))
    partial = sums + part * 4
    if (start >= first) & (end <= last) & (end * ROW <= right):
        for turn in range(ROUNDS):
            row = start + turn * TILE + tile
            word = _words(source, row, left, right, True, CAST, ROW, TILE)
            if COPY:
                tl.store(target + (row[:, None] * ROW + place), word)
            if COUNT:
                plain, keyed = _sums(word, low_key, high_key)
                plain_total += _mix(plain, number + row, STEP, MIX_0, MIX_1)
                keyed_total += _mix(keyed, number + row, STEP, MIX_0, MIX_1)
    else:
        at_first = tl.zeros((TILE,), dtype=tl.int32)
        for turn in range(tl.minimum(ROUNDS, (rows - start + TILE - 1) // TILE).to(tl.int32)):
            row = start + turn * TILE + tile
            word = _words(source, row, left, right, False, CAST, ROW, TILE)
            if COPY:
                at = row[:, None] * ROW + place
                tl.store(target + at, word, mask=(at >= left) & (at < right))
            if COUNT:
                plain, keyed = _sums(word, low_key, high_key)
                complete = (row >= first) & (row < last)
                plain_total += tl.where(complete, _mix(plain, number + row, STEP, MIX_0, MIX_1), 0)
                keyed_total += tl.where(complete, _mix(keyed, number + row, STEP, MIX_0, MIX_1), 0)
                tl.store(partial + at_first, plain, mask=row == 0)
                tl.store(partial + 1 + at_first, keyed, mask=row == 0)
                tl.store(partial + 2 + at_first, plain, mask=row == rows - 1)
                tl.store(partial + 3 + at_first, keyed, mask=row == rows - 1)
    if COUNT:
        totals = sums + parts * 4 + program * 2
        tl.store(totals, tl.sum(plain_total, axis=0))
        tl.store(totals + 1, tl.sum(keyed_total, axis=0))


def count_by_triton(batch: Batch, *, count: bool = True) -> Callable[[], Words]:
    """Count a batch, with the results of `reference.row_sums`, and copy it where it has copies; without `count`, only
    copy. The kernel writes its sums to host memory, so that no other operation has to wait for its turn on the GPU."""
    device, size = batch.data[0].device, len(batch.data)
    table, starts, programs = _table(batch)
    out = torch.empty(4 * size + 2 * programs, dtype=torch.int64, pin_memory=device.type == "cuda")

    def sums() -> Words:
        found = out.numpy().view(np.uint64)
        totals = np.add.reduceat(found[4 * size :].reshape(programs, 2), starts, axis=0)
        return np.concatenate([totals, found[: 4 * size].reshape(size, 4)], axis=1)

    _count_kernel[(programs,)](
        torch.from_numpy(table).to(device, non_blocking=True),
        reference.keys_on(device),
        out.data_ptr(),
        size,
        FIELDS=_FIELDS,
        ROW=ROW,
        TILE=_TILE,
        ROUNDS=_ROUNDS,
        CAST=batch.cast,
        COPY=bool(batch.copies),
        COUNT=count,
        STEP=reference.signed(STEP),
        MIX_0=reference.signed(MIX[0]),
        MIX_1=reference.signed(MIX[1]),
        num_warps=_WARPS,
    )
    return sums


def _table(batch: Batch) -> tuple[Ints, Ints, int]:
    """Describe each part to the kernel: the addresses at which its first row would begin in memory and in the copy, the
    range of words in it, that row's number, the range of complete rows, all rows, its first program. Then comes each
    program's part. Also returned: these first programs, and the number of programs."""
    offsets, sizes = np.array(batch.offsets), np.array(batch.sizes)
    ends = offsets + sizes
    number = offsets // ROW_BYTES
    rows = -(-ends // ROW_BYTES) - number
    first = (offsets % ROW_BYTES > 0).astype(np.int64)
    last = np.maximum(first, rows - ((ends % ROW_BYTES > 0) & ~np.array(batch.last)))
    begins = offsets if batch.copies else offsets // UNIT * UNIT
    left = begins % ROW_BYTES // 8
    right = (ends + 7) // 8 - number * ROW
    sources = np.array(_addresses(batch)) - left * (16 if batch.cast else 8)
    targets = np.array([copy.data_ptr() for copy in batch.copies]) - left * 8 if batch.copies else sources
    programs = -(-rows // (_TILE * _ROUNDS))
    starts = np.cumsum(programs) - programs
    owners = np.repeat(np.arange(len(programs)), programs)
    fields = [sources, targets, left, right, number, first, last, rows, starts]
    return np.concatenate([np.stack(fields, axis=1).ravel(), owners]), starts, len(owners)


def _addresses(batch: Batch) -> list[int]:
    """The address of each part's words. A part that is only counted and is not aligned is copied to where it is."""
    if not batch.copies:
        batch.data[:] = [
            reference.words_of(data, offset) for data, offset in zip(batch.data, batch.offsets, strict=True)
        ]
    return [data.data_ptr() for data in batch.data]
