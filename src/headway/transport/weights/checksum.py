"""The keyed sum behind fingerprints: Σ v_i·k_i mod 2^64 over the 64-bit words of a tensor's bytes, on any device.

For a word w = lo + 2^32·hi, v = w + hi, so that both halves meet the key in their full width. Words are cut into
blocks; with j the place in block b, k = T[j]·U[b], where T[j] = 2j + 1 and U[b] = 1 + 2·BLOCK·b, each plus noise
above bit 33. So every key is odd (any single flipped bit shows), the low 33 bits of all keys of a tensor up to 16
GiB differ (any swapped pair of elements up to 32 bits wide shows), and the noise keeps errors from cancelling by
chance. Both v and the sum are linear in disjoint bits, so shards may begin and end anywhere.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 1 << 14
PLACE_SEED, BLOCK_SEED = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = (1 << 64) - 1
_ROUND = 4
"""Blocks that are worked on at a time: their words and keys stay in a core's cache."""
_SPAN = 64
"""Blocks that a thread sums before it takes the next (8 MiB): threads rarely meet at the interpreter's lock."""
_scratch = threading.local()

Words = NDArray[np.uint64]
Pending = int | Future[int] | Tensor


def keyed_sum(tensor: Tensor, byte_offset: int) -> int:
    """The sum of `tensor`'s bytes, which begin `byte_offset` bytes into the whole."""
    return sum(int(part.result() if isinstance(part, Future) else part) for part in begin(tensor, byte_offset)) & MASK


def begin(tensor: Tensor, byte_offset: int) -> list[Pending]:
    """Parts of the sum, some of them under way in other threads or on a device: `tensor` must not change meanwhile."""
    words, first = _words(tensor, byte_offset)
    if words.device.type != "cpu":
        from headway.transport.weights.checksum_device import sum_on_device

        return [sum_on_device(words, first)]
    threads = torch.get_num_threads()
    spans = list(_spans(words.numpy().view(np.uint64), first))
    if threads == 1 or len(words) < BLOCK:
        return [_span_sum(*span) for span in spans]
    return [_pool(threads).submit(*span) for span in spans]


def place_keys() -> Words:
    """T: the keys of the places in a block."""
    places = np.arange(BLOCK, dtype=np.uint64)
    return (_noise(places, PLACE_SEED) << np.uint64(33)) + 2 * places + 1


def block_keys(first: int, count: int) -> Words:
    """U: the keys of `count` blocks from `first` on."""
    blocks = np.arange(first, first + count, dtype=np.uint64)
    return (_noise(blocks, BLOCK_SEED) << np.uint64(33)) + 2 * BLOCK * blocks + 1


def _words(tensor: Tensor, byte_offset: int) -> tuple[Tensor, int]:
    """The tensor as int64 words, zero-padded to word boundaries of the whole, and the first word's number."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    lead = byte_offset % 8
    if lead or len(data) % 8 or data.data_ptr() % 8:
        padded = data.new_zeros((lead + len(data) + 7) // 8 * 8)
        padded[lead : lead + len(data)] = data
        data = padded
    return data.view(torch.int64), byte_offset // 8


def _spans(words: Words, first: int) -> Iterator[tuple[Words, int]]:
    step = _SPAN * BLOCK
    starts = [0, *range(step - first % step, len(words), step)]
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        yield words[start:end], first + start


def _span_sum(words: Words, first: int) -> int:
    """Whole blocks several at a time, the incomplete ones at both ends by themselves."""
    places = _cached_place_keys()
    head = min(-first % BLOCK, len(words))
    whole = (len(words) - head) // BLOCK * BLOCK
    total = _part_of_block(words[:head], first) + _part_of_block(words[head + whole :], first + head + whole)
    blocks = words[head : head + whole].reshape(-1, BLOCK)
    keys = block_keys((first + head) // BLOCK, len(blocks))
    for start in range(0, len(blocks), _ROUND):
        sums = np.einsum("ij,j->i", _spread(blocks[start : start + _ROUND]), places)
        total += int(np.dot(sums, keys[start : start + _ROUND]))
    return total


def _part_of_block(words: Words, first: int) -> int:
    if not len(words):
        return 0
    place = first % BLOCK
    total = np.dot(_spread(words[None])[0], _cached_place_keys()[place : place + len(words)])
    return int(total) * int(block_keys(first // BLOCK, 1)[0])


def _spread(words: Words) -> Words:
    """v of each word, in this thread's scratch memory."""
    if not hasattr(_scratch, "memory"):
        _scratch.memory = np.empty(_ROUND * BLOCK, dtype=np.uint64)
    v: Words = _scratch.memory[: words.size].reshape(words.shape)
    np.right_shift(words, np.uint64(32), out=v)
    return np.add(v, words, out=v)


@lru_cache(1)
def _cached_place_keys() -> Words:
    return place_keys()


class _Pool:
    """Threads that sum spans: numpy works outside the interpreter's lock. What waits is in memory, so it is bounded."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "fingerprint")
        self._slots = threading.BoundedSemaphore(4 * threads)

    def submit(self, words: Words, first: int) -> Future[int]:
        self._slots.acquire()
        future = self._executor.submit(_span_sum, words, first)
        future.add_done_callback(lambda _: self._slots.release())
        return future


@lru_cache(1)
def _pool(threads: int) -> _Pool:
    return _Pool(threads)


def _noise(counter: Words, seed: int) -> Words:
    """A well-mixed word per counter (the finalizer of SplitMix64)."""
    x = counter + np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX[1])
    return x ^ (x >> np.uint64(31))
