"""Copies between the device and CPU memory that run beside computation."""

from typing import Protocol

import torch
from torch import Tensor


class Copy(Protocol):
    """A copy that was started. What it reads must not change before it has been waited for."""

    def wait(self) -> Tensor:
        """Let whatever is computed from now on wait for the copy, and return the tensor that it fills."""
        ...


class Copies(Protocol):
    """Starts copies, which run one after the other in the order in which they were started."""

    def takes(self, tensor: Tensor) -> bool:
        """Tell if `tensor` is on the device."""
        ...

    def to_host(self, tensor: Tensor, into: Tensor | None = None) -> Copy:
        """Copy from the device, into new CPU memory or the given tensor."""
        ...

    def to_device(self, tensor: Tensor) -> Copy:
        """Copy from CPU memory."""
        ...

    def host_zeros(self, like: Tensor) -> Tensor:
        """Make a tensor of zeros in CPU memory that can be copied to and from, sharded as `like` is."""
        ...

    def finish(self) -> None:
        """Wait until CPU memory has everything that was copied to it."""
        ...


def make_copies(device: torch.device) -> Copies | None:
    """Return the copies of a device; None where tensors are in CPU memory already."""
    return CudaCopies(device) if device.type == "cuda" else None


class CudaCopies:
    """Copies on a stream of their own, to and from pinned memory, which alone the GPU can reach by itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here

    def takes(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def to_host(self, tensor: Tensor, into: Tensor | None = None) -> Copy:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True) if into is None else into
        return self._start(tensor, host)

    def to_device(self, tensor: Tensor) -> Copy:
        return self._start(tensor, torch.empty_like(tensor, device=self._device))

    def host_zeros(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like, device="cpu", pin_memory=True, requires_grad=False)

    def finish(self) -> None:
        self._stream.synchronize()

    def _start(self, source: Tensor, target: Tensor) -> Copy:
        # What is read has to be computed first; what is written may be memory that is still in use.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        return _CudaCopy(source, target, done, self._device)


class _CudaCopy:
    """Holds both tensors until it is waited for: then the memory of either may be used for something else."""

    def __init__(self, source: Tensor, target: Tensor, done: torch.cuda.Event, device: torch.device) -> None:
        self._tensors, self._done, self._device = (source, target), done, device

    def wait(self) -> Tensor:
        torch.cuda.current_stream(self._device).wait_event(self._done)
        return self._tensors[1]
