"""Tokens for a step as `headway.inference.embedded.sampling.sampler` draws them, in one call."""

import ctypes

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.cpu.library import engine_kernels

Ints = NDArray[np.int64]


class _Sampling(ctypes.Structure):
    """`struct sampling` of sample.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("seeds", "temperatures", "greedy")]


class Sampling:
    """Seeds, temperatures and greediness of sequences, by their rows: arrays that stay where they are."""

    def __init__(self, seeds: NDArray[np.uint64], temperatures: NDArray[np.float32], greedy: NDArray[np.bool_]) -> None:
        self._arrays = (seeds, temperatures, greedy)
        self._described = _Sampling(*(array.ctypes.data for array in self._arrays))
        self._pointer = ctypes.addressof(self._described)
        self._integers = np.empty((3, len(seeds)), dtype=np.int64)
        self._at = [row.ctypes.data for row in self._integers]
        self._logprobs = np.empty(len(seeds), dtype=np.float32)
        self._scratch = np.empty(0, dtype=np.float32)
        self._then = [self._logprobs.ctypes.data, 0]

    def draw(self, logits_NV: Tensor, which: Ints, positions: Ints) -> tuple[list[int], list[float]]:
        """Tokens and their logprobs, NaN where logits are not finite. Row i of the float32 logits belongs to the
        sequence in row `which[i]`, whose token will stand at `positions[i]`."""
        rows, vocab = logits_NV.shape
        logits_NV = logits_NV.contiguous()
        if len(self._scratch) < 2 * vocab:
            self._scratch = np.empty(2 * vocab, dtype=np.float32)
            self._then[1] = self._scratch.ctypes.data
        integers = self._integers
        integers[0, :rows] = which
        integers[1, :rows] = positions
        engine_kernels().sample(logits_NV.data_ptr(), rows, vocab, self._pointer, *self._at, *self._then)
        return integers[2, :rows].tolist(), self._logprobs[:rows].tolist()
