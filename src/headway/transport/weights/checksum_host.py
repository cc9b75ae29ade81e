"""The checksum in the host's memory, in as many threads as torch has, and on the way of a copy where one is made."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from headway.transport.weights.checksum import ROW, Tally, Words, across, scramble, tally

_SPAN = 1 << 19
"""Words that are copied and counted at a time (4 MiB): each pass after the first finds them in a cache."""
_SHARE = 4 * _SPAN
"""Words that a thread takes at a time: threads rarely meet at the interpreter's lock."""


def begin(words: Tensor, first: int, copy: Tensor | None = None) -> list[Tally | Future[Tally]]:
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


def count(words: Words, first: int, copy: Words | None = None) -> Tally:
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
    return _tally(first, first + len(words), rows, columns)


def _tally(first: int, last: int, rows: Words, columns: Words) -> Tally:
    skipped = first % ROW > 0
    complete = rows[skipped : len(rows) - (last % ROW > 0)]
    total = scramble(complete, first // ROW + skipped) if len(complete) else 0
    ((parity, places),) = across(columns[None])
    return tally(first, last, (total, int(rows[0]), int(rows[-1])), parity, places)


def _cuts(count: int, first: int, size: int) -> Iterator[tuple[int, int]]:
    """From where to where each of `count` words' pieces goes, cut at multiples of `size` of the whole."""
    starts = [0, *range(size - first % size, count, size)]
    return zip(starts, [*starts[1:], count], strict=True)


class _Pool:
    """Threads that count: numpy works outside the interpreter's lock. What waits is in memory, so it is bounded."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "fingerprint")
        self._slots = threading.BoundedSemaphore(4 * threads)

    def submit(self, words: Words, first: int, copy: Words | None) -> Future[Tally]:
        self._slots.acquire()
        future = self._executor.submit(count, words, first, copy)
        future.add_done_callback(lambda _: self._slots.release())
        return future


@lru_cache(1)
def _pool(threads: int) -> _Pool:
    return _Pool(threads)
