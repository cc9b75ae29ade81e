"""The checksum behind fingerprints: of a tensor's 64-bit words, in rows of 1,024, two things are kept.

Along the rows: each row's integer sum mod 2^64 is scrambled together with the row's number, and the results are summed.
Across them: the words are xored, all of them (`parity`) and each times its place in its row (`places`, a product of
polynomials over two elements, mod x^64 + x^4 + x^3 + x + 1). A word costs an addition and a xor; keys meet the small
results alone.

What shows for certain: a changed word (thus any flipped bit), since its row's sum differs and scrambling maps one to
one; two swapped elements of one row, whatever their width, since parity or places differ. Everything else (elements
swapped further apart, a stale tensor, swapped rows or shards, a wrong offset, a torn write, negated weights) shows but
for the chance of two 64-bit numbers being equal: integer sums see what xor is blind to (a change that repeats), and the
other way round.

Sums and xors are linear in disjoint bytes, so shards may begin and end anywhere. A row that a shard holds in part is
`loose`: its sum is scrambled only when all parts are in.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROW = 1 << 10
MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_REDUCTION = np.uint64(0x1B)

Words = NDArray[np.uint64]


@dataclass(slots=True)
class Tally:
    """What is known of a tensor so far: its complete rows, the sums of its loose ones, parity and places."""

    rows: int = 0
    loose: dict[int, int] = field(default_factory=dict)
    parity: int = 0
    places: int = 0

    def merge(self, other: "Tally") -> None:
        """Add what is known of other words of the same tensor."""
        self.rows = (self.rows + other.rows) & MASK
        for row, part in other.loose.items():
            self.loose[row] = (self.loose.get(row, 0) + part) & MASK
        self.parity ^= other.parity
        self.places ^= other.places

    def total(self) -> int:
        """All rows, the loose ones taken for complete."""
        return (self.rows + sum(_scrambled(part, row) for row, part in self.loose.items())) & MASK


def tally(first: int, last: int, sums: tuple[int, int, int], parity: int, places: int) -> Tally:
    """Of words `first .. last` of a tensor. `sums` are the complete rows' scrambled, the first row's and the last
    row's; the latter two count where that row is not complete. Words of one row alone are its last."""
    rows, head, tail = sums
    loose = {}
    if last % ROW:
        loose[last // ROW] = tail
    if first % ROW and first // ROW not in loose:
        loose[first // ROW] = head
    return Tally(rows, loose, parity, places)


def words_of(tensor: Tensor, byte_offset: int) -> tuple[Tensor, int]:
    """The tensor as int64 words, zero-padded to word boundaries of the whole, and the first word's number."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    lead = byte_offset % 8
    if lead or len(data) % 8 or data.data_ptr() % 8:
        padded = data.new_zeros((lead + len(data) + 7) // 8 * 8)
        padded[lead : lead + len(data)] = data
        data = padded
    return data.view(torch.int64), byte_offset // 8


def scramble(sums: Words, row: int) -> int:
    """The sums of complete rows, the first of which is number `row`: scrambled, and summed."""
    numbers = np.arange(row + 1, row + 1 + len(sums), dtype=np.uint64)
    x = sums + numbers * np.uint64(STEP)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX[1])
    return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))


def _scrambled(total: int, row: int) -> int:
    """SplitMix64's finalizer: well mixed, and one to one."""
    x = (total + (row + 1) * STEP) & MASK
    x = ((x ^ (x >> 30)) * MIX[0]) & MASK
    x = ((x ^ (x >> 27)) * MIX[1]) & MASK
    return x ^ (x >> 31)


def across(columns: Words) -> Iterator[tuple[int, int]]:
    """Parity and places of each line of `columns`, which holds the xor of the words in each place of a row.

    They come from the xors of the places whose numbers have a bit set, the highest bit first.
    """
    places = np.zeros(len(columns), dtype=np.uint64)
    while (half := columns.shape[1] // 2) > 0:
        high = columns[:, half:]
        times_x = (places << np.uint64(1)) ^ (places >> np.uint64(63)) * _REDUCTION
        places = times_x ^ np.bitwise_xor.reduce(high, axis=1)
        columns = columns[:, :half] ^ high
    return zip(columns[:, 0].tolist(), places.tolist(), strict=True)
