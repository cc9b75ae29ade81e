"""The checksum on an accelerator, in the same pass as a copy where one is made, for many tensors in one launch.

A Triton kernel counts where Triton is installed, the reference elsewhere.
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from headway.base.devices import triton_installed
from headway.transport.weights.fingerprint.reference import UNIT, Batch, Checksum, Words, checksum_of, row_sums

_BATCH_SIZE = 128
"""Tensors counted in one launch: the accelerator works while the host prepares the next ones."""

Key = TypeVar("Key")
Pending = Callable[[], Words]
"""To be called when the accelerator is done: returns the six sums of `row_sums` for each tensor of a batch."""


class DeviceCounter(Generic[Key]):
    """Counts memory of one accelerator, in the current stream. What is added must stay unchanged until `fetch`."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[bool, bool], tuple[list[Key], Batch]] = {}
        self._launched: list[tuple[list[Key], Batch, Pending]] = []
        self._stream: torch.cuda.Stream | None = None

    def add(self, key: Key, data: Tensor, offset: int, copy: Tensor | None = None, *, last: bool = False) -> None:
        """Count contiguous memory that begins `offset` bytes into the tensor of `key`, and is its `last` part or not.

        It is also copied to `copy`, which must satisfy `can_copy_and_count`. Nothing is synchronized."""
        target = data if copy is None else copy
        kind = (copy is not None, target.dtype is not data.dtype)
        if kind not in self._waiting:
            self._waiting[kind] = ([], Batch(cast=kind[1]))
        keys, batch = self._waiting[kind]
        keys.append(key)
        batch.data.append(data)
        if copy is not None:
            batch.copies.append(copy)
        batch.offsets.append(offset)
        batch.sizes.append(target.nbytes)
        batch.last.append(last)
        if len(keys) == _BATCH_SIZE:
            self._launch(kind)

    def fetch(self) -> Iterator[tuple[Key, Checksum]]:
        """Wait for everything that was added. One checksum at a time: many objects at once set off Python's garbage
        collector."""
        self.wait()
        launched, self._launched = self._launched, []
        for keys, batch, sums in launched:
            rows = zip(keys, batch.offsets, batch.sizes, batch.last, *sums().T.tolist(), strict=True)
            for key, offset, size, last, a, b, c, d, e, f in rows:
                whole = last and not offset
                yield key, Checksum((a, b)) if whole else checksum_of(offset, size, (a, b), (c, d), (e, f), last=last)

    def wait(self) -> None:
        """Launch what is waiting, and wait until the accelerator is done."""
        for kind in list(self._waiting):
            self._launch(kind)
        self._synchronize()

    def __del__(self) -> None:
        # A kernel that nobody waited for writes to memory that is about to be freed.
        self._synchronize()

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._stream = None

    def _launch(self, kind: tuple[bool, bool]) -> None:
        keys, batch = self._waiting.pop(kind)
        if batch.data[0].is_cuda:
            self._stream = torch.cuda.current_stream(batch.data[0].device)
        self._launched.append((keys, batch, count_batch(batch)))


def count_batch(batch: Batch) -> Pending:
    """Start to count, and to copy where there are copies."""
    if batch.data[0].is_cuda and triton_installed():
        # Importing Triton takes long, and it may not be installed.
        from headway.transport.weights.fingerprint.triton_kernel import count_by_triton

        with torch.cuda.device(batch.data[0].device):
            return count_by_triton(batch)
    found = torch.stack([row_sums(*part) for part in zip(batch.data, batch.offsets, batch.last, strict=True)])
    return lambda: found.cpu().numpy().view(np.uint64)


def can_copy_and_count(data: Tensor, copy: Tensor, offset: int) -> bool:
    """Tell if `data`, `offset` bytes into the whole tensor, can be counted while it is copied to `copy`, contiguous
    memory of the elements' own dtype or of the one that they are cast to."""
    if not (data.is_cuda and copy.is_cuda and copy.device == data.device and data.is_contiguous()):
        return False
    cast = data.dtype is torch.float32 and copy.dtype is torch.bfloat16
    source = data.data_ptr() - offset * (2 if cast else 1)
    return (
        (cast or data.dtype is copy.dtype)
        and triton_installed()
        and not (offset % 8 or copy.nbytes % 8)
        and not (source % UNIT or (copy.data_ptr() - offset) % UNIT)
    )
