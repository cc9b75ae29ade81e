"""A whole version of the weights in a file in memory: written by the server, mapped by the workers on its host."""

import mmap
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGN = 64


class TensorSpan(NamedTuple):
    """A tensor and the bytes of a staged file that hold it."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    bytes: int


class StagedFile:
    """A whole version in memory that workers on this host can map by `path`.

    It has no name in any folder, so it is gone with the last process that uses it, however that ends.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("headway-weights")
        self._end = 0
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.spans: list[TensorSpan] = []

    def add(self, name: str, tensor: Tensor) -> None:
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        os.lseek(self._file, self._end, os.SEEK_SET)
        self.spans.append(
            TensorSpan(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self._end, len(data))
        )
        written = 0
        while written < len(data):
            written += os.write(self._file, data[written : written + mmap.PAGESIZE * 2**16])
        self._end += -(-len(data) // _ALIGN) * _ALIGN

    @property
    def bytes(self) -> int:
        return sum(span.bytes for span in self.spans)

    def close(self) -> None:
        os.close(self._file)


def read_staged(path: str, spans: list[TensorSpan]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a staged file, mapped and not copied."""
    size = max(span.offset + span.bytes for span in spans)
    data = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    for span in spans:
        dtype: torch.dtype = getattr(torch, span.dtype)
        yield span.name, data[span.offset : span.offset + span.bytes].view(dtype).view(span.shape)
