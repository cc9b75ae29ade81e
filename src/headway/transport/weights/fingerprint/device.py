"""The checksum on an accelerator, on the way of a copy where one is made.

A kernel counts where there is Triton, torch's own operations elsewhere.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from headway.transport.weights.fingerprint.reference import KEYS, MIX, ROW, ROW_BYTES, STEP, Tally, Words, tally

_CHUNK = 1 << 13
"""Rows per round (32 MiB), which bounds what torch's operations write on their way."""
_TOGETHER = 128
"""Tensors that are counted in one launch: the accelerator works while the host goes on to the next ones."""
UNIT = 16
"""Bytes that a kernel reads at a time."""

Key = TypeVar("Key")
Pending = Callable[[], Words]
"""To be called when the accelerator is done. For each part a line of sums, plain and keyed: of its complete rows,
scrambled; of its first row; of its last one."""


@dataclass(slots=True)
class Parts:
    """Contiguous memory of an accelerator: `sizes` bytes each, which begin `offsets` bytes into the whole tensors and,
    where `last`, are the end of them. With `copies` it is copied there, from float32 to bfloat16 if it is to be `cast`;
    then sizes and offsets are those of the copies."""

    cast: bool = False
    data: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    last: list[bool] = field(default_factory=list)


class DeviceCount(Generic[Key]):
    """Counts memory of one accelerator, in the current stream. What is given must stay unchanged until `fetch`."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[bool, bool], tuple[list[Key], Parts]] = {}
        self._launched: list[tuple[list[Key], Parts, Pending]] = []
        self._stream: torch.cuda.Stream | None = None

    def add(self, key: Key, data: Tensor, offset: int, copy: Tensor | None = None, *, last: bool = False) -> None:
        """Contiguous memory that begins `offset` bytes into the whole tensor of `key`, and is its `last` part or not.

        `copy` gets it on the way, if `in_one_pass` says so. Nothing is synchronized."""
        target = data if copy is None else copy
        way = (copy is not None, target.dtype is not data.dtype)
        if way not in self._waiting:
            self._waiting[way] = ([], Parts(cast=way[1]))
        keys, parts = self._waiting[way]
        keys.append(key)
        parts.data.append(data)
        if copy is not None:
            parts.copies.append(copy)
        parts.offsets.append(offset)
        parts.sizes.append(target.nbytes)
        parts.last.append(last)
        if len(keys) == _TOGETHER:
            self._launch(way)

    def fetch(self) -> Iterator[tuple[Key, Tally]]:
        """Wait for all that was added. One at a time, since many objects at once set Python's garbage collector off."""
        for way in list(self._waiting):
            self._launch(way)
        self._wait()
        launched, self._launched = self._launched, []
        for keys, parts, sums in launched:
            places = zip(keys, parts.offsets, parts.sizes, parts.last, *sums().T.tolist(), strict=True)
            for key, offset, size, last, a, b, c, d, e, f in places:
                whole = last and not offset
                yield key, Tally((a, b)) if whole else tally(offset, size, (a, b), (c, d), (e, f), last=last)

    def __del__(self) -> None:
        # A kernel that was never waited for writes to memory that is about to be given back.
        self._wait()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._stream = None

    def _launch(self, way: tuple[bool, bool]) -> None:
        keys, parts = self._waiting.pop(way)
        if parts.data[0].is_cuda:
            self._stream = torch.cuda.current_stream(parts.data[0].device)
        self._launched.append((keys, parts, count_many(parts)))


def in_one_pass(data: Tensor, copy: Tensor, offset: int) -> bool:
    """Whether `data`, `offset` bytes into the whole tensor, can be counted while it is copied to `copy`, contiguous
    memory of the elements' own dtype or of the one that they are cast to."""
    if not (data.is_cuda and copy.is_cuda and copy.device == data.device and data.is_contiguous()):
        return False
    cast = data.dtype is torch.float32 and copy.dtype is torch.bfloat16
    source = data.data_ptr() - offset * (2 if cast else 1)
    return (
        (cast or data.dtype is copy.dtype)
        and _triton_installed()
        and not (offset % 8 or copy.nbytes % 8)
        and not (source % UNIT or (copy.data_ptr() - offset) % UNIT)
    )


def count_many(parts: Parts) -> Pending:
    """Begin to count, and to copy where there are copies."""
    if parts.data[0].is_cuda and _triton_installed():
        from headway.transport.weights.fingerprint.triton_kernel import pass_by_triton

        with torch.cuda.device(parts.data[0].device):
            return pass_by_triton(parts)
    found = torch.stack([count_by_torch(*part) for part in zip(parts.data, parts.offsets, parts.last, strict=True)])
    return lambda: found.cpu().numpy().view(np.uint64)


def count_by_torch(data: Tensor, offset: int, last: bool = False) -> Tensor:
    end = offset + data.nbytes
    words, number = words_of(data, offset), offset // ROW_BYTES
    rows, before = -(-end // ROW_BYTES) - number, offset // UNIT * UNIT % ROW_BYTES // 8
    words = torch.nn.functional.pad(words, (before, rows * ROW - before - len(words)))
    keys = keys_on(words.device).long() & 0xFFFFFFFF
    chunks = torch.split(words.view(-1, ROW), _CHUNK)
    plain = torch.cat([chunk.sum(1) for chunk in chunks])
    keyed = torch.cat([((chunk & 0xFFFFFFFF) * keys[0] + _shifted(chunk, 32) * keys[1]).sum(1) for chunk in chunks])
    sums = torch.stack([plain, keyed])
    first = int(offset % ROW_BYTES > 0)
    complete = sums[:, first : max(first, rows - int(end % ROW_BYTES > 0 and not last))]
    x = torch.arange(1, complete.shape[1] + 1, device=words.device) + (number + first)
    x = complete + x * signed(STEP)
    x = (x ^ _shifted(x, 30)) * signed(MIX[0])
    x = (x ^ _shifted(x, 27)) * signed(MIX[1])
    return torch.cat([(x ^ _shifted(x, 31)).sum(1), sums[:, 0], sums[:, -1]])


def words_of(data: Tensor, offset: int) -> Tensor:
    """Contiguous memory as int64 words, zero-padded to units of the whole where its own are others."""
    flat, lead = data.detach().view(-1).view(torch.uint8), offset % UNIT
    if lead or len(flat) % 8 or data.data_ptr() % UNIT:
        padded = flat.new_zeros((lead + len(flat) + UNIT - 1) // UNIT * UNIT)
        padded[lead : lead + len(flat)] = flat
        flat = padded
    return flat.view(torch.int64)


@cache
def keys_on(device: torch.device) -> Tensor:
    """The keys of a row's words (int32, whose bits count): those of the lower halves, those of the upper ones."""
    return torch.from_numpy(KEYS.view(np.int32).reshape(ROW, 2).T.copy()).to(device)


def signed(word: int) -> int:
    """The integer of 64 bits with a sign that has the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None
