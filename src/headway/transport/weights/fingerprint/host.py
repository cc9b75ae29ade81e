"""The checksum in host memory, in as many threads as torch has, in the same pass as a copy where one is made.

The compiled pass (`checksum.c`) copies and counts as fast as a copy alone. Without a C compiler the reference counts,
several times slower.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from headway.base.compiler import shared_library
from headway.base.errors import HeadwayError
from headway.transport.weights.fingerprint.reference import KEYS, Checksum, checksum_of, row_sums

logger = logging.getLogger(__name__)
_SHARE = 1 << 24
"""Bytes that a thread takes at a time, so that threads rarely wait for the interpreter's lock."""

Count = Callable[[Tensor, int, Tensor | None], Checksum]
"""Counts contiguous memory that begins some bytes into the tensor, and copies it where a copy is wanted."""


def count_on_host(data: Tensor, offset: int, copy: Tensor | None = None) -> list[Checksum | Future[Checksum]]:
    """Count contiguous host memory, which begins `offset` bytes into the tensor, and copy its bytes to `copy`.

    Other threads may still be at work on return: `data` must not change before all futures are done.
    """
    count, threads = counter(), torch.get_num_threads()
    if threads == 1 or data.nbytes < _SHARE // 16:
        return [count(data, offset, copy)]
    source, target = _bytes(data), None if copy is None else _bytes(copy)
    pool, cuts = _pool(threads), _cuts(len(source), offset, _SHARE)
    return [pool.submit(count, source[a:b], offset + a, None if target is None else target[a:b]) for a, b in cuts]


@cache
def counter() -> Count:
    """Choose the fastest pass that this machine has."""
    try:
        library = ctypes.CDLL(str(shared_library("checksum", [Path(__file__).with_name("checksum.c")])))
    except (HeadwayError, OSError) as error:
        logger.info("weights are fingerprinted by the slower reference: %s", error)
        return count_by_torch
    compiled, pointer, results = library.count, ctypes.c_void_p, ctypes.c_uint64 * 6
    compiled.argtypes = [pointer, pointer, ctypes.c_int64, ctypes.c_uint64, pointer, pointer]
    compiled.restype = None
    keys = KEYS.ctypes.data

    def count(data: Tensor, offset: int, copy: Tensor | None = None) -> Checksum:
        sums, size = results(), data.nbytes
        compiled(data.data_ptr(), None if copy is None else copy.data_ptr(), size, offset, keys, ctypes.byref(sums))
        rows, keyed_rows, head, keyed_head, tail, keyed_tail = sums
        return checksum_of(offset, size, (rows, keyed_rows), (head, keyed_head), (tail, keyed_tail))

    return count


def count_by_torch(data: Tensor, offset: int, copy: Tensor | None = None) -> Checksum:
    """Copy and count with the reference."""
    if copy is not None:
        _bytes(copy).copy_(_bytes(data))
    plain, keyed, head, keyed_head, tail, keyed_tail = row_sums(data, offset).view(torch.uint64).tolist()
    return checksum_of(offset, data.nbytes, (plain, keyed), (head, keyed_head), (tail, keyed_tail))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _cuts(count: int, first: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut `count` bytes, the first of which is number `first` of the tensor, at multiples of `size` of the tensor."""
    starts = [0, *range(size - first % size, count, size)]
    return zip(starts, [*starts[1:], count], strict=True)


class _Pool:
    """Threads that count outside the interpreter's lock. Waiting work holds memory, so it is bounded."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "fingerprint")
        self._slots = threading.BoundedSemaphore(4 * threads)

    def submit(self, count: Count, data: Tensor, offset: int, copy: Tensor | None) -> Future[Checksum]:
        self._slots.acquire()
        future = self._executor.submit(count, data, offset, copy)
        future.add_done_callback(lambda _: self._slots.release())
        return future


@lru_cache(1)
def _pool(threads: int) -> _Pool:
    return _Pool(threads)
