"""The checksum behind fingerprints, and its reference in PyTorch, which every faster version must equal.

A tensor's 64-bit words stand in rows of 512. Each row is summed twice, mod 2^64: once plainly, and once `keyed`, with
each half of a word (32 bits) multiplied by an odd 32-bit key that belongs to its position in the row. Either sum is
mixed with the row's number, and the mixed sums are added up over the rows. A word costs a few instructions and nothing
is written, so that counting hides behind the memory's speed.

Found for certain: a changed word (thus any flipped bit), since its row's plain sum differs and mixing maps one to one;
two swapped elements of one row, of up to 32 bits, since keys differ, and are odd where powers of two are not.
Everything else (elements swapped further apart, a stale tensor, swapped rows or shards, a wrong offset, a torn write,
negated weights) is found unless sums of random numbers happen to agree, both of them in every row that is touched.

Sums are linear in disjoint bytes, so shards may begin and end anywhere. A row of which a shard holds a part is
`partial`: its sums are mixed only when all parts are together.
"""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROW = 512
ROW_BYTES = 8 * ROW
MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
UNIT = 16
"""Bytes that a kernel reads at a time."""

Sums = tuple[int, int]
"""The plain one and the keyed one."""


Words = NDArray[np.uint64]


@dataclass(slots=True)
class Batch:
    """Contiguous memory of one accelerator, counted in one launch: `sizes` bytes each, which begin `offsets` bytes into
    the whole tensors and, where `last`, end with them. With `copies` it is copied there, from float32 to bfloat16 if it
    is to be `cast`; then sizes and offsets are those of the copies."""

    cast: bool = False
    data: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    last: list[bool] = field(default_factory=list)


@dataclass(slots=True)
class Checksum:
    """The checksum of some bytes of a tensor: the mixed sums of complete rows, and the sums of partial ones."""

    complete: Sums = (0, 0)
    partial: dict[int, Sums] = field(default_factory=dict)

    def merge(self, other: "Checksum") -> None:
        """Add the checksum of other bytes of the same tensor."""
        if not self.partial and self.complete == (0, 0):
            self.complete, self.partial = other.complete, dict(other.partial)
            return
        self.complete = _add(self.complete, other.complete)
        for row, part in other.partial.items():
            self.partial[row] = _add(self.partial.get(row, (0, 0)), part)

    def total(self) -> Sums:
        """Sum up all rows, taking the partial ones for complete."""
        total = self.complete
        for row, (plain, keyed) in self.partial.items():
            total = _add(total, (mix(plain, row), mix(keyed, row)))
        return total


def checksum_of(offset: int, size: int, complete: Sums, head: Sums, tail: Sums, *, last: bool = False) -> Checksum:
    """Make the checksum of `size` bytes that begin `offset` bytes into the tensor from the mixed sums of the complete
    rows, the sums of the first row (`head`) and those of the last one (`tail`), of which only partial ones count. Where
    the tensor ends with these bytes, their `last` row is complete."""
    out = Checksum(complete)
    end = offset + size
    if offset % ROW_BYTES:
        out.partial[offset // ROW_BYTES] = head
    if end % ROW_BYTES and not last and (not offset % ROW_BYTES or end // ROW_BYTES > offset // ROW_BYTES):
        out.partial[end // ROW_BYTES] = tail
    return out


def mix(total: int, row: int) -> int:
    """SplitMix64's finalizer: well mixed, and one to one."""
    x = (total + (row + 1) * STEP) & MASK
    x = ((x ^ (x >> 30)) * MIX[0]) & MASK
    x = ((x ^ (x >> 27)) * MIX[1]) & MASK
    return x ^ (x >> 31)


def _add(some: Sums, others: Sums) -> Sums:
    return (some[0] + others[0]) & MASK, (some[1] + others[1]) & MASK


KEYS: NDArray[np.uint32] = np.array([mix(0, place) >> 32 | 1 for place in range(2 * ROW)], dtype=np.uint32)
"""The keys of the halves of a row's words, the lower half first. No two are equal."""


def row_sums(data: Tensor, offset: int, last: bool = False) -> Tensor:
    """Count contiguous memory of any device that begins `offset` bytes into the tensor: six int64, the plain and the
    keyed sum of its complete rows (mixed), of its first row and of its last one. Nothing is synchronized."""
    end = offset + data.nbytes
    words, number = words_of(data, offset), offset // ROW_BYTES
    rows, before = -(-end // ROW_BYTES) - number, offset // UNIT * UNIT % ROW_BYTES // 8
    if missing := rows * ROW - len(words):
        words = torch.nn.functional.pad(words, (before, missing - before))
    keys = keys_on(words.device).long() & 0xFFFFFFFF
    # As many rows at a time as a cache holds, or enough for an accelerator: this bounds the intermediate results.
    chunks = torch.split(words.view(-1, ROW), 64 if data.is_cpu else 1 << 13)
    plain = torch.cat([chunk.sum(1) for chunk in chunks])
    keyed = torch.cat([((chunk & 0xFFFFFFFF) * keys[0] + _shift(chunk, 32) * keys[1]).sum(1) for chunk in chunks])
    sums = torch.stack([plain, keyed])
    first = int(offset % ROW_BYTES > 0)
    complete = sums[:, first : max(first, rows - int(end % ROW_BYTES > 0 and not last))]
    x = torch.arange(1, complete.shape[1] + 1, device=words.device) + (number + first)
    x = complete + x * signed(STEP)
    x = (x ^ _shift(x, 30)) * signed(MIX[0])
    x = (x ^ _shift(x, 27)) * signed(MIX[1])
    return torch.cat([(x ^ _shift(x, 31)).sum(1), sums[:, 0], sums[:, -1]])


def words_of(data: Tensor, offset: int) -> Tensor:
    """View contiguous memory as int64 words; where it is not aligned as the tensor's units are, copy it zero-padded."""
    flat, lead = data.detach().view(-1).view(torch.uint8), offset % UNIT
    if lead or len(flat) % 8 or data.data_ptr() % UNIT:
        padded = flat.new_zeros((lead + len(flat) + UNIT - 1) // UNIT * UNIT)
        padded[lead : lead + len(flat)] = flat
        flat = padded
    return flat.view(torch.int64)


@cache
def keys_on(device: torch.device) -> Tensor:
    """The keys as int32 bit patterns: those of the words' lower halves, those of the upper ones."""
    return torch.from_numpy(KEYS.view(np.int32).reshape(ROW, 2).T.copy()).to(device)


def signed(word: int) -> int:
    """The signed 64-bit integer with the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift to the right and bring in zeros."""
    return (x >> bits) & ((1 << 64 - bits) - 1)
