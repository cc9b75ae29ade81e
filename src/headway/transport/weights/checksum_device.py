"""The checksum's two passes on an accelerator, by torch's own operations; the host works up the few results."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.transport.weights.checksum import ROW, Counted

_CHUNK = 1 << 12
"""Rows per round (32 MiB), which bounds what the xors write on their way."""


@dataclass(frozen=True, slots=True)
class CountedOnDevice:
    """A `Counted` whose `sums`, the rows' and then the columns', have not been waited for."""

    first: int
    last: int
    sums: Tensor


def count_on_device(words: Tensor, first: int) -> CountedOnDevice:
    """Count int64 words, the first of which is number `first` of the whole tensor. Nothing is synchronized."""
    last = first + len(words)
    before, after = first % ROW, -last % ROW
    if before or after:
        words = torch.nn.functional.pad(words, (before, after))
    matrix = words.view(-1, ROW)
    columns = words.new_zeros(ROW)
    for row in range(0, len(matrix), _CHUNK):
        columns = columns ^ _xor_of_rows(matrix[row : row + _CHUNK])
    return CountedOnDevice(first, last, torch.cat([matrix.sum(1), columns]))


def fetch_counted(counted: list[CountedOnDevice]) -> list[Counted]:
    """Wait for them all, with one copy to the host."""
    together = torch.cat([part.sums for part in counted]).cpu().numpy().view(np.uint64)
    cuts = np.cumsum([len(part.sums) for part in counted])[:-1]
    return [
        Counted(part.first, part.last, sums[:-ROW], sums[-ROW:])
        for part, sums in zip(counted, np.split(together, cuts), strict=True)
    ]


def _xor_of_rows(matrix: Tensor) -> Tensor:
    """Torch has no reduction by xor: halves are laid upon each other until one row is left."""
    while len(matrix) > 1:
        half = len(matrix) // 2
        odd = matrix[2 * half :]
        matrix = matrix[:half] ^ matrix[half : 2 * half]
        if len(odd):
            matrix[0] ^= odd[0]
    return matrix[0]
