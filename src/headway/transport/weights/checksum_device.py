"""The checksum on an accelerator: a kernel where there is Triton, torch's own operations elsewhere."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from headway.transport.weights.checksum import KEYS, MIX, ROW, ROW_BYTES, STEP, Tally, tally

_CHUNK = 1 << 13
"""Rows per round (32 MiB), which bounds what torch's operations write on their way."""


@dataclass(frozen=True, slots=True)
class CountedOnDevice:
    """A tally of `size` bytes from byte `offset` on that has not been waited for. `sums` (int64) are plain and keyed:
    of the complete rows, scrambled; of the first row; of the last one."""

    offset: int
    size: int
    sums: Tensor


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


def count_on_device(data: Tensor, offset: int) -> CountedOnDevice:
    """Count flat bytes that begin `offset` bytes into the whole tensor. Nothing is synchronized."""
    words, extent = _words_of(data, offset), Extent.of(offset, len(data))
    if words.is_cuda and _triton_installed():
        from headway.transport.weights.checksum_triton import count_words

        return CountedOnDevice(offset, len(data), count_words(words, extent))
    return CountedOnDevice(offset, len(data), count_by_torch(words, extent))


def fetch_tallies(counted: list[CountedOnDevice]) -> list[Tally]:
    """Wait for them all, with one copy to the host."""
    together = torch.stack([part.sums for part in counted]).cpu().numpy().view(np.uint64).tolist()
    return [_tally(part, *sums) for part, sums in zip(counted, together, strict=True)]


def count_by_torch(words: Tensor, extent: Extent) -> Tensor:
    """Of int64 words."""
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


@cache
def keys_on(device: torch.device) -> Tensor:
    """The keys of a row's words as int64: those of the lower halves, those of the upper ones."""
    return torch.from_numpy(KEYS.astype(np.int64).reshape(ROW, 2).T.copy()).to(device)


def signed(word: int) -> int:
    """The integer of 64 bits with a sign that has the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _tally(part: CountedOnDevice, *sums: int) -> Tally:
    return tally(part.offset, part.size, (sums[0], sums[1]), (sums[2], sums[3]), (sums[4], sums[5]))


def _words_of(data: Tensor, offset: int) -> Tensor:
    """Bytes as int64 words, zero-padded to word boundaries of the whole."""
    lead = offset % 8
    if lead or len(data) % 8 or data.data_ptr() % 8:
        padded = data.new_zeros((lead + len(data) + 7) // 8 * 8)
        padded[lead : lead + len(data)] = data
        data = padded
    return data.view(torch.int64)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None
