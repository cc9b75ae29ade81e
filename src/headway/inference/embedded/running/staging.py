"""Small arrays on their way between host and device, without making either wait."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

_TURNS = 2
"""Buffers used in turns: a step is prepared while the copy for the one before it may be under way."""


def to_device(values: NDArray[np.integer], device: torch.device) -> Tensor:
    """A copy on the device. From pinned memory, since from any other the host would wait for what runs there."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Staging:
    """Fields of 8 bytes for up to `capacity` rows, at one address on the device; `send` replaces their content there.

    A buffer is used again two sends later: by then the step that the first was for must have been collected.
    """

    def __init__(self, fields: int, capacity: int, device: torch.device) -> None:
        self.on_device = torch.zeros((fields, capacity), dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._buffers = [torch.zeros((fields, capacity), dtype=torch.int64, pin_memory=pinned) for _ in range(_TURNS)]
        self._arrays: list[Ints] = [buffer.numpy() for buffer in self._buffers]
        self._turn = 0

    def next(self) -> Ints:
        """Where to write what is sent next, (fields, capacity)."""
        self._turn = (self._turn + 1) % _TURNS
        return self._arrays[self._turn]

    def send(self) -> None:
        self.on_device.copy_(self._buffers[self._turn], non_blocking=True)


class Landing:
    """A tensor on its way to the host. `wait` returns it when it is there."""

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
