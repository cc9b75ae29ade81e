"""The checksum behind fingerprints: of a tensor's 64-bit words, in rows of 1,024, two things are kept.

Along the rows: each row's integer sum mod 2^64 is scrambled together with the row's number, and the results are summed.
Across them: the words are xored, all of them (`parity`) and each times its place in its row (`places`, a product of
polynomials over two elements, mod x^64 + x^4 + x^3 + x + 1). Both need one plain pass each, which is all that
numpy can do near the speed of memory; keys meet the small results alone.

What shows for certain: a changed word (thus any flipped bit), since its row's sum differs and scrambling maps one to
one; two swapped elements of one row, whatever their width, since parity or places differ. Everything else (elements
swapped further apart, a stale tensor, swapped rows or shards, a wrong offset, a torn write, negated weights) shows but
for the chance of two 64-bit numbers being equal: integer sums see what xor is blind to (a change that repeats), and the
other way round.

Sums and xors are linear in disjoint bytes, so shards may begin and end anywhere. A row that a shard holds in part is
`loose`: its sum is scrambled only when all parts are in.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROW = 1 << 10
MASK = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_REDUCTION = np.uint64(0x1B)
_SPAN = 1 << 19
"""Words that are copied and counted at a time (4 MiB): each pass after the first finds them in a cache."""
_SHARE = 4 * _SPAN
"""Words that a thread takes at a time: threads rarely meet at the interpreter's lock."""

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Counted:
    """The sums of the rows that consecutive words touch, and the xor of the words in each place of a row.

    `first` and `last` are the numbers of the first word and of the one after the last in the whole tensor.
    """

    first: int
    last: int
    rows: Words
    columns: Words


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


def tallies(counted: list[Counted]) -> list[Tally]:
    """One of each, computed together: there may be thousands of small ones."""
    out = [Tally() for _ in counted]
    complete = []
    for tally, part in zip(out, counted, strict=True):
        row, rows = part.first // ROW, part.rows
        if part.last % ROW:
            tally.loose[part.last // ROW] = int(rows[-1])
            rows = rows[:-1]
        if part.first % ROW and len(rows):
            tally.loose[row] = int(rows[0])
            row, rows = row + 1, rows[1:]
        if len(rows):
            complete.append((tally, row, rows))
    if complete:
        bounds = np.cumsum([0, *(len(rows) for _, _, rows in complete)])
        numbers = np.concatenate([np.arange(row, row + len(rows), dtype=np.uint64) for _, row, rows in complete])
        scrambled = _scramble(np.concatenate([rows for _, _, rows in complete]) + (numbers + np.uint64(1)) * _STEP)
        for (tally, _, _), total in zip(complete, np.add.reduceat(scrambled, bounds[:-1]).tolist(), strict=True):
            tally.rows = total
    for tally, (parity, places) in zip(out, _across([part.columns for part in counted]), strict=True):
        tally.parity, tally.places = parity, places
    return out


def words_of(tensor: Tensor, byte_offset: int) -> tuple[Tensor, int]:
    """The tensor as int64 words, zero-padded to word boundaries of the whole, and the first word's number."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    lead = byte_offset % 8
    if lead or len(data) % 8 or data.data_ptr() % 8:
        padded = data.new_zeros((lead + len(data) + 7) // 8 * 8)
        padded[lead : lead + len(data)] = data
        data = padded
    return data.view(torch.int64), byte_offset // 8


def begin(words: Tensor, first: int, copy: Tensor | None = None) -> list[Counted | Future[Counted]]:
    """Count int64 words in the host's memory, the first of which is number `first` of the whole, and copy them.

    Some may be under way in other threads: `words` must not change meanwhile.
    """
    source = words.numpy().view(np.uint64)
    target = None if copy is None else copy.numpy().view(np.uint64)
    threads = torch.get_num_threads()
    if threads == 1 or len(source) < ROW:
        return [count(source, first, target)]
    pool, shares = _pool(threads), _cuts(len(source), first, _SHARE)
    return [pool.submit(source[a:b], first + a, None if target is None else target[a:b]) for a, b in shares]


def count(words: Words, first: int, copy: Words | None = None) -> Counted:
    """Copy and count span by span."""
    rows = np.zeros(-(-(first + len(words)) // ROW) - first // ROW, dtype=np.uint64)
    columns = np.zeros(ROW, dtype=np.uint64)
    for start, end in _cuts(len(words), first, _SPAN):
        span = words[start:end]
        if copy is not None:
            np.copyto(copy[start:end], span)
        place, row = (first + start) % ROW, (first + start) // ROW - first // ROW
        head = min(-place % ROW, len(span))
        middle = span[head : head + (len(span) - head) // ROW * ROW].reshape(-1, ROW)
        tail = span[head + middle.size :]
        if head:
            rows[row] = np.add.reduce(span[:head])
            columns[place : place + head] ^= span[:head]
            row += 1
        if len(middle):
            rows[row : row + len(middle)] = np.add.reduce(middle, axis=1)
            columns ^= np.bitwise_xor.reduce(middle, axis=0)
        if len(tail):
            rows[row + len(middle)] = np.add.reduce(tail)
            columns[: len(tail)] ^= tail
    return Counted(first, first + len(words), rows, columns)


def _cuts(count: int, first: int, size: int) -> Iterator[tuple[int, int]]:
    """From where to where each of `count` words' pieces goes, cut at multiples of `size` of the whole."""
    starts = [0, *range(size - first % size, count, size)]
    return zip(starts, [*starts[1:], count], strict=True)


def _scramble(x: Words) -> Words:
    """SplitMix64's finalizer: well mixed, and one to one."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX[1])
    return x ^ (x >> np.uint64(31))


def _scrambled(total: int, row: int) -> int:
    x = (total + (row + 1) * int(_STEP)) & MASK
    x = ((x ^ (x >> 30)) * _MIX[0]) & MASK
    x = ((x ^ (x >> 27)) * _MIX[1]) & MASK
    return x ^ (x >> 31)


def _across(columns: list[Words]) -> Iterator[tuple[int, int]]:
    """Parity and places of each, from the xors of the places whose numbers have a bit set, the highest bit first."""
    words = np.stack(columns)
    places = np.zeros(len(words), dtype=np.uint64)
    while (half := words.shape[1] // 2) > 0:
        high = words[:, half:]
        times_x = (places << np.uint64(1)) ^ (places >> np.uint64(63)) * _REDUCTION
        places = times_x ^ np.bitwise_xor.reduce(high, axis=1)
        words = words[:, :half] ^ high
    return zip(words[:, 0].tolist(), places.tolist(), strict=True)


class _Pool:
    """Threads that count: numpy works outside the interpreter's lock. What waits is in memory, so it is bounded."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "fingerprint")
        self._slots = threading.BoundedSemaphore(4 * threads)

    def submit(self, words: Words, first: int, copy: Words | None) -> Future[Counted]:
        self._slots.acquire()
        future = self._executor.submit(count, words, first, copy)
        future.add_done_callback(lambda _: self._slots.release())
        return future


@lru_cache(1)
def _pool(threads: int) -> _Pool:
    return _Pool(threads)
