"""The checksum behind fingerprints: of a tensor's 64-bit words, in rows of 512, each row is summed twice, mod 2^64.

Once plainly, and once `keyed`: each half of a word (32 bits) times a key that belongs to its place in the row, an odd
number of 32 bits. Either sum is scrambled together with the row's number, and over the rows the results are summed. A
word costs a few instructions and nothing is written, so that counting is hidden behind the memory's speed.

What shows for certain: a changed word (thus any flipped bit), since its row's plain sum differs and scrambling maps one
to one; two swapped elements of one row, of up to 32 bits, since keys differ, and are odd where powers of two are not.
Everything else (elements swapped further apart, a stale tensor, swapped rows or shards, a wrong offset, a torn write,
negated weights) shows but for the chance that sums of random numbers agree, both of them in every row that is touched.

Sums are linear in disjoint bytes, so shards may begin and end anywhere. A row that a shard holds in part is `loose`:
its sums are scrambled only when all parts are in.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ROW = 512
ROW_BYTES = 8 * ROW
MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

Words = NDArray[np.uint64]
Sums = tuple[int, int]
"""The plain one and the keyed one."""


@dataclass(slots=True)
class Tally:
    """What is known of a tensor so far: the scrambled sums of its complete rows, and the sums of its loose ones."""

    rows: Sums = (0, 0)
    loose: dict[int, Sums] = field(default_factory=dict)

    def merge(self, other: "Tally") -> None:
        """Add what is known of other bytes of the same tensor."""
        if not self.loose and self.rows == (0, 0):
            self.rows, self.loose = other.rows, dict(other.loose)
            return
        self.rows = _added(self.rows, other.rows)
        for row, part in other.loose.items():
            self.loose[row] = _added(self.loose.get(row, (0, 0)), part)

    def total(self) -> Sums:
        """All rows, the loose ones taken for complete."""
        total = self.rows
        for row, (plain, keyed) in self.loose.items():
            total = _added(total, (scrambled(plain, row), scrambled(keyed, row)))
        return total


def tally(offset: int, size: int, rows: Sums, head: Sums, tail: Sums, *, last: bool = False) -> Tally:
    """Of `size` bytes that begin `offset` bytes into the tensor: the complete rows' scrambled sums, the first row's
    where that isn't complete, and the last row's where that is another one and isn't complete. Where the tensor ends
    with these bytes, their `last` row is."""
    out = Tally(rows)
    end = offset + size
    if offset % ROW_BYTES:
        out.loose[offset // ROW_BYTES] = head
    if end % ROW_BYTES and not last and (not offset % ROW_BYTES or end // ROW_BYTES > offset // ROW_BYTES):
        out.loose[end // ROW_BYTES] = tail
    return out


def scramble(sums: Words, row: int) -> int:
    """The sums of complete rows, the first of which is number `row`: scrambled, and summed."""
    numbers = np.arange(row + 1, row + 1 + len(sums), dtype=np.uint64)
    x = sums + numbers * np.uint64(STEP)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX[1])
    return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))


def scrambled(total: int, row: int) -> int:
    """SplitMix64's finalizer: well mixed, and one to one."""
    x = (total + (row + 1) * STEP) & MASK
    x = ((x ^ (x >> 30)) * MIX[0]) & MASK
    x = ((x ^ (x >> 27)) * MIX[1]) & MASK
    return x ^ (x >> 31)


def _added(some: Sums, others: Sums) -> Sums:
    return (some[0] + others[0]) & MASK, (some[1] + others[1]) & MASK


KEYS: NDArray[np.uint32] = np.array([scrambled(0, place) >> 32 | 1 for place in range(2 * ROW)], dtype=np.uint32)
"""Of the halves of a row's words, the lower one first. No two are equal."""
