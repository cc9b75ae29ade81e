"""The checksum on an accelerator: a kernel where there is Triton, torch's own operations elsewhere."""

from functools import cache
from importlib.util import find_spec
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from headway.transport.weights.checksum import KEYS, MIX, ROW, ROW_BYTES, STEP, Tally, tally

_CHUNK = 1 << 13
"""Rows per round (32 MiB), which bounds what torch's operations write on their way."""
_TOGETHER = 64
"""Tensors that are counted in one launch: the accelerator works while the host goes on to the next ones."""

Key = TypeVar("Key")


class Parts(NamedTuple):
    """Contiguous memory of an accelerator: `sizes` bytes each, which begin `offsets` bytes into the whole tensors."""

    data: list[Tensor]
    offsets: list[int]
    sizes: list[int]


class DeviceCount(Generic[Key]):
    """Counts memory of one accelerator, in the current stream. What is given must stay unchanged until `fetch`."""

    def __init__(self) -> None:
        self._waiting = Parts([], [], [])
        self._given: list[tuple[Key, int, int]] = []
        self._sums: list[Tensor] = []

    def add(self, key: Key, data: Tensor, offset: int) -> None:
        """Contiguous memory that begins `offset` bytes into the whole tensor of `key`. Nothing is synchronized."""
        waiting, size = self._waiting, data.nbytes
        waiting.data.append(data)
        waiting.offsets.append(offset)
        waiting.sizes.append(size)
        self._given.append((key, offset, size))
        if len(waiting.data) == _TOGETHER:
            self._launch()

    def fetch(self) -> list[tuple[Key, Tally]]:
        """Wait for all that was added, with one copy to the host."""
        self._launch()
        if not self._given:
            return []
        sums = torch.cat(self._sums).cpu().numpy().view(np.uint64).tolist()
        given, self._given, self._sums = self._given, [], []
        return [(key, _tally(offset, size, *some)) for (key, offset, size), some in zip(given, sums, strict=True)]

    def _launch(self) -> None:
        if self._waiting.data:
            self._sums.append(count_many(self._waiting))
            self._waiting = Parts([], [], [])


def count_many(parts: Parts) -> Tensor:
    """For each part a line of sums, plain and keyed: of its complete rows, scrambled; of its first row; of its last."""
    if parts.data[0].is_cuda and _triton_installed():
        from headway.transport.weights.checksum_triton import count_by_triton

        return count_by_triton(parts)
    return torch.stack([count_by_torch(data, offset) for data, offset in zip(parts.data, parts.offsets, strict=True)])


def count_by_torch(data: Tensor, offset: int) -> Tensor:
    end = offset + data.nbytes
    words, number = words_of(data, offset), offset // ROW_BYTES
    rows, before = -(-end // ROW_BYTES) - number, offset % ROW_BYTES // 8
    words = torch.nn.functional.pad(words, (before, rows * ROW - before - len(words)))
    keys = keys_on(words.device).long() & 0xFFFFFFFF
    chunks = torch.split(words.view(-1, ROW), _CHUNK)
    plain = torch.cat([chunk.sum(1) for chunk in chunks])
    keyed = torch.cat([((chunk & 0xFFFFFFFF) * keys[0] + _shifted(chunk, 32) * keys[1]).sum(1) for chunk in chunks])
    sums = torch.stack([plain, keyed])
    first = int(offset % ROW_BYTES > 0)
    complete = sums[:, first : max(first, rows - int(end % ROW_BYTES > 0))]
    x = torch.arange(1, complete.shape[1] + 1, device=words.device) + (number + first)
    x = complete + x * signed(STEP)
    x = (x ^ _shifted(x, 30)) * signed(MIX[0])
    x = (x ^ _shifted(x, 27)) * signed(MIX[1])
    return torch.cat([(x ^ _shifted(x, 31)).sum(1), sums[:, 0], sums[:, -1]])


def words_of(data: Tensor, offset: int) -> Tensor:
    """Contiguous memory as int64 words, zero-padded to word boundaries of the whole."""
    flat, lead = data.detach().view(-1).view(torch.uint8), offset % 8
    if not aligned(data, offset):
        padded = flat.new_zeros((lead + len(flat) + 7) // 8 * 8)
        padded[lead : lead + len(flat)] = flat
        flat = padded
    return flat.view(torch.int64)


def aligned(data: Tensor, offset: int) -> bool:
    """Whether words of the whole are words of the memory."""
    return not (offset % 8 or data.nbytes % 8 or data.data_ptr() % 8)


@cache
def keys_on(device: torch.device) -> Tensor:
    """The keys of a row's words (int32, whose bits count): those of the lower halves, those of the upper ones."""
    return torch.from_numpy(KEYS.view(np.int32).reshape(ROW, 2).T.copy()).to(device)


def signed(word: int) -> int:
    """The integer of 64 bits with a sign that has the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _tally(offset: int, size: int, *sums: int) -> Tally:
    return tally(offset, size, (sums[0], sums[1]), (sums[2], sums[3]), (sums[4], sums[5]))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None
