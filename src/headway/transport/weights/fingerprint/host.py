"""The checksum in the host's memory, in as many threads as torch has, and on the way of a copy where one is made.

The compiled pass copies and counts as fast as a copy alone. Where there is no compiler numpy does it, several times
slower; the sums are the same.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.compiler import shared_library
from headway.core.errors import HeadwayError
from headway.transport.weights.fingerprint.reference import (
    KEYS,
    MASK,
    ROW,
    ROW_BYTES,
    Sums,
    Tally,
    Words,
    scramble,
    tally,
)

_log = logging.getLogger("headway.weights")
_SPAN = 64 * ROW_BYTES
"""Bytes that numpy counts at a time, which stay in a cache."""
_SHARE = 1 << 24
"""Bytes that a thread takes at a time: threads rarely meet at the interpreter's lock."""

Bytes = NDArray[np.uint8]
Count = Callable[[Tensor, int, Tensor | None], Tally]
"""Counts contiguous memory that begins some bytes into the whole tensor, and copies it where that is wanted."""


def begin(data: Tensor, offset: int, copy: Tensor | None = None) -> list[Tally | Future[Tally]]:
    """Count contiguous memory of the host, which begins `offset` bytes into the whole tensor, and copy its bytes.

    Some may be under way in other threads: `data` must not change meanwhile.
    """
    count, threads = counter(), torch.get_num_threads()
    if threads == 1 or data.nbytes < _SHARE // 16:
        return [count(data, offset, copy)]
    source, target = _bytes(data), None if copy is None else _bytes(copy)
    pool, cuts = _pool(threads), _cuts(len(source), offset, _SHARE)
    return [pool.submit(count, source[a:b], offset + a, None if target is None else target[a:b]) for a, b in cuts]


@cache
def counter() -> Count:
    """The fastest pass that this machine has."""
    try:
        library = ctypes.CDLL(str(shared_library("checksum", [Path(__file__).with_name("checksum.c")])))
    except (HeadwayError, OSError) as error:
        _log.info("weights are fingerprinted by numpy, which is slower: %s", error)
        return count_by_numpy
    compiled, pointer, results = library.count, ctypes.c_void_p, ctypes.c_uint64 * 6
    compiled.argtypes = [pointer, pointer, ctypes.c_int64, ctypes.c_uint64, pointer, pointer]
    compiled.restype = None
    keys = KEYS.ctypes.data

    def count(data: Tensor, offset: int, copy: Tensor | None = None) -> Tally:
        sums, size = results(), data.nbytes
        compiled(data.data_ptr(), None if copy is None else copy.data_ptr(), size, offset, keys, ctypes.byref(sums))
        rows, keyed_rows, head, keyed_head, tail, keyed_tail = sums
        return tally(offset, size, (rows, keyed_rows), (head, keyed_head), (tail, keyed_tail))

    return count


def count_by_numpy(tensor: Tensor, offset: int, copy: Tensor | None = None) -> Tally:
    """The same by numpy."""
    data = _bytes(tensor).numpy()
    if copy is not None:
        np.copyto(_bytes(copy).numpy(), data)
    head = min(-offset % ROW_BYTES, len(data))
    rows = (len(data) - head) // ROW_BYTES
    tail = head + rows * ROW_BYTES
    plain = keyed = 0
    for start in range(head, tail, _SPAN):
        sums = _sums_of_rows(data[start : min(start + _SPAN, tail)])
        row = (offset + start) // ROW_BYTES
        plain, keyed = plain + scramble(sums[0], row), keyed + scramble(sums[1], row)
    return tally(
        offset,
        len(data),
        (plain & MASK, keyed & MASK),
        _sums_of_part(data[:head], offset % ROW_BYTES),
        _sums_of_part(data[tail:], 0),
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _sums_of_part(data: Bytes, begin: int) -> Sums:
    """Of bytes that begin `begin` bytes into a row."""
    row = np.zeros(ROW_BYTES, dtype=np.uint8)
    row[begin : begin + len(data)] = data
    plain, keyed = _sums_of_rows(row)
    return int(plain[0]), int(keyed[0])


def _sums_of_rows(data: Bytes) -> tuple[Words, Words]:
    if data.ctypes.data % 8:
        data = data.copy()
    halves = data.view("<u4").reshape(-1, 2 * ROW)
    plain: Words = data.view("<u8").reshape(-1, ROW).sum(axis=1, dtype=np.uint64)
    keyed: Words = np.multiply(halves, KEYS, dtype=np.uint64).sum(axis=1, dtype=np.uint64)
    return plain, keyed


def _cuts(count: int, first: int, size: int) -> Iterator[tuple[int, int]]:
    """From where to where each of `count` bytes' pieces goes, cut at multiples of `size` of the whole."""
    starts = [0, *range(size - first % size, count, size)]
    return zip(starts, [*starts[1:], count], strict=True)


class _Pool:
    """Threads that count, outside the interpreter's lock. What waits is in memory, so it is bounded."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "fingerprint")
        self._slots = threading.BoundedSemaphore(4 * threads)

    def submit(self, count: Count, data: Tensor, offset: int, copy: Tensor | None) -> Future[Tally]:
        self._slots.acquire()
        future = self._executor.submit(count, data, offset, copy)
        future.add_done_callback(lambda _: self._slots.release())
        return future


@lru_cache(1)
def _pool(threads: int) -> _Pool:
    return _Pool(threads)
