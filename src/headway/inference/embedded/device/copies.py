"""Asynchronous copies of small arrays between host and device."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

MOST_REPEATS = 8
"""Most repetitions of one step without the host."""
TURNS = 2 * MOST_REPEATS
"""Host buffers: a step and all its repetitions are prepared while the copies of the last one's may still run."""


def to_device(values: NDArray[np.integer], device: torch.device) -> Tensor:
    """Copy to the device through pinned memory, so that the host does not wait for running kernels."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class InputBuffers:
    """Fields of 8 bytes for up to `capacity` rows, at a fixed address on the device that `send` overwrites.

    A host buffer is reused `TURNS` sends later; the step it was for must have been collected by then.
    """

    def __init__(self, fields: int, capacity: int, device: torch.device) -> None:
        self.on_device = torch.zeros((fields, capacity), dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._buffers = [torch.zeros((fields, capacity), dtype=torch.int64, pin_memory=pinned) for _ in range(TURNS)]
        self._arrays: list[Ints] = [buffer.numpy() for buffer in self._buffers]
        self._turn = 0

    def next(self) -> Ints:
        """The host array (fields, capacity) that the next `send` copies."""
        self._turn = (self._turn + 1) % TURNS
        return self._arrays[self._turn]

    def send(self) -> None:
        self.on_device.copy_(self._buffers[self._turn], non_blocking=True)


class HostCopy:
    """A copy to the host in flight. `wait` returns it once it has arrived."""

    def __init__(self, source: Tensor, buffer: Tensor) -> None:
        self._buffer = buffer
        self._there: torch.cuda.Event | None = None
        buffer.copy_(source, non_blocking=True)
        if source.is_cuda:
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
            self._there.record()

    def wait(self) -> Tensor:
        if self._there is not None:
            self._there.synchronize()
        return self._buffer
