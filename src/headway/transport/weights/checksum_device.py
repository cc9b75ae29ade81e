"""The checksum on an accelerator: a kernel where there is Triton, torch's own operations elsewhere."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from headway.transport.weights.checksum import KEYS, MIX, ROW, ROW_BYTES, STEP, Tally, tally

_CHUNK = 1 << 13
"""Rows per round (32 MiB), which bounds what torch's operations write on their way."""
_TOGETHER = 64
"""Tensors that are counted in one launch: the accelerator works while the host goes on to the next ones."""

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Extent:
    """Where bytes lie in the rows of a whole: how many words of the first row come before them, the first row's number,
    how many rows they touch, and which of these are complete."""

    before: int
    number: int
    rows: int
    complete: slice

    @classmethod
    def of(cls, offset: int, size: int) -> "Extent":
        end = offset + size
        number, rows = offset // ROW_BYTES, -(-end // ROW_BYTES) - offset // ROW_BYTES
        head, tail = int(offset % ROW_BYTES > 0), int(end % ROW_BYTES > 0)
        return cls(offset % ROW_BYTES // 8, number, rows, slice(head, max(head, rows - tail)))


class DeviceCount(Generic[Key]):
    """Counts memory of one accelerator, in the current stream. What is given must stay unchanged until `fetch`."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Extent]] = []
        self._given: list[tuple[Key, int, int]] = []
        self._sums: list[Tensor] = []

    def add(self, key: Key, data: Tensor, offset: int) -> None:
        """Flat bytes that begin `offset` bytes into the whole tensor of `key`. Nothing is synchronized."""
        self._waiting.append((words_of(data, offset), Extent.of(offset, len(data))))
        self._given.append((key, offset, len(data)))
        if len(self._waiting) == _TOGETHER:
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
        if self._waiting:
            self._sums.append(count_many(self._waiting))
            self._waiting = []


def count_many(parts: list[tuple[Tensor, Extent]]) -> Tensor:
    """For each part (int64 words) a line of sums, plain and keyed: of its complete rows, scrambled; of its first row;
    of its last one."""
    if parts[0][0].is_cuda and _triton_installed():
        from headway.transport.weights.checksum_triton import count_by_triton

        return count_by_triton(parts)
    return torch.stack([count_by_torch(words, extent) for words, extent in parts])


def count_by_torch(words: Tensor, extent: Extent) -> Tensor:
    after = extent.rows * ROW - extent.before - len(words)
    if extent.before or after:
        words = torch.nn.functional.pad(words, (extent.before, after))
    keys = keys_on(words.device)
    chunks = torch.split(words.view(-1, ROW), _CHUNK)
    plain = torch.cat([chunk.sum(1) for chunk in chunks])
    keyed = torch.cat([((chunk & 0xFFFFFFFF) * keys[0] + _shifted(chunk, 32) * keys[1]).sum(1) for chunk in chunks])
    sums = torch.stack([plain, keyed])
    complete = sums[:, extent.complete]
    x = torch.arange(1, complete.shape[1] + 1, device=words.device) + (extent.number + extent.complete.start)
    x = complete + x * signed(STEP)
    x = (x ^ _shifted(x, 30)) * signed(MIX[0])
    x = (x ^ _shifted(x, 27)) * signed(MIX[1])
    return torch.cat([(x ^ _shifted(x, 31)).sum(1), sums[:, 0], sums[:, -1]])


def words_of(data: Tensor, offset: int) -> Tensor:
    """Bytes as int64 words, zero-padded to word boundaries of the whole."""
    lead = offset % 8
    if lead or len(data) % 8 or data.data_ptr() % 8:
        padded = data.new_zeros((lead + len(data) + 7) // 8 * 8)
        padded[lead : lead + len(data)] = data
        data = padded
    return data.view(torch.int64)


@cache
def keys_on(device: torch.device) -> Tensor:
    """The keys of a row's words as int64: those of the lower halves, those of the upper ones."""
    return torch.from_numpy(KEYS.astype(np.int64).reshape(ROW, 2).T.copy()).to(device)


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
