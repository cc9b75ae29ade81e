"""The checksum on an accelerator: a kernel where there is Triton, torch's own operations elsewhere."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from headway.transport.weights.checksum import MIX, ROW, STEP, Tally, across, tally

HEADER = 3
"""The scrambled sum of the complete rows, the first row's sum and the last row's come before the columns."""
_CHUNK = 1 << 12
"""Rows per round (32 MiB), which bounds what the xors write on their way."""


@dataclass(frozen=True, slots=True)
class CountedOnDevice:
    """A tally of words `first .. last` that has not been waited for: `HEADER` sums, and the xors of the columns."""

    first: int
    last: int
    sums: Tensor


def count_on_device(words: Tensor, first: int) -> CountedOnDevice:
    """Count int64 words, the first of which is number `first` of the whole tensor. Nothing is synchronized."""
    if words.is_cuda and _triton_installed():
        from headway.transport.weights.checksum_triton import count_words

        return CountedOnDevice(first, first + len(words), count_words(words, first))
    return CountedOnDevice(first, first + len(words), count_by_torch(words, first))


def fetch_tallies(counted: list[CountedOnDevice]) -> list[Tally]:
    """Wait for them all, with one copy to the host."""
    together = torch.stack([part.sums for part in counted]).cpu().numpy().view(np.uint64)
    return [
        tally(part.first, part.last, (sums[0], sums[1], sums[2]), parity, places)
        for part, sums, (parity, places) in zip(
            counted, together[:, :HEADER].tolist(), across(together[:, HEADER:]), strict=True
        )
    ]


def count_by_torch(words: Tensor, first: int) -> Tensor:
    before, after = first % ROW, -(first + len(words)) % ROW
    if before or after:
        words = torch.nn.functional.pad(words, (before, after))
    matrix = words.view(-1, ROW)
    columns = words.new_zeros(ROW)
    for row in range(0, len(matrix), _CHUNK):
        columns = columns ^ _xor_of_rows(matrix[row : row + _CHUNK])
    sums = matrix.sum(1)
    complete = sums[bool(before) : len(sums) - bool(after)]
    numbers = torch.arange(len(complete), device=words.device) + (first // ROW + bool(before) + 1)
    x = complete + numbers * signed(STEP)
    x = (x ^ _shifted(x, 30)) * signed(MIX[0])
    x = (x ^ _shifted(x, 27)) * signed(MIX[1])
    total = (x ^ _shifted(x, 31)).sum()
    return torch.cat([torch.stack([total, sums[0], sums[-1]]), columns])


def signed(word: int) -> int:
    """The integer of 64 bits with a sign that has the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


def _xor_of_rows(matrix: Tensor) -> Tensor:
    """Torch has no reduction by xor: halves are laid upon each other until one row is left."""
    while len(matrix) > 1:
        half = len(matrix) // 2
        odd = matrix[2 * half :]
        matrix = matrix[:half] ^ matrix[half : 2 * half]
        if len(odd):
            matrix[0] ^= odd[0]
    return matrix[0]


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None
