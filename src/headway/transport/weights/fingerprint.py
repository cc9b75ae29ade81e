"""Fingerprints of weights: a position-keyed sum of bit patterns per tensor, additive over any sharding.

Ranks fingerprint the shards they hold and add the sums up (mod 2^64), without gathering a tensor. Any flipped
bit, swapped pair of elements, renamed, reshaped or retyped tensor changes the result; `checksum` says why.
"""

import hashlib
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from headway.transport.weights.checksum import MASK, Pending, begin


class TensorSum(msgspec.Struct, frozen=True):
    """One tensor's share of a fingerprint, ready for the wire."""

    dtype: str
    shape: tuple[int, ...]
    sum: int


@dataclass(slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    known: int = 0
    pending: list[Pending] = field(default_factory=list)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Fingerprint:
    """Collects tensors or shards of them, in any order. Sums stay on their device until they are asked for."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def add(
        self,
        name: str,
        tensor: Tensor,
        offset: int = 0,
        shape: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Count `tensor`: all of `name`, or its elements from flat index `offset` on where `shape` is the whole's.

        `dtype`, where given, is what the whole is said to be; it must be as wide as the tensor's own. Raises
        ValueError where that or an earlier shard disagrees. `tensor` must not change before the sums are asked for.
        """
        whole = tuple(tensor.shape if shape is None else shape)
        kind = tensor.dtype if dtype is None else dtype
        if kind.itemsize != tensor.dtype.itemsize:
            raise ValueError(f"{name}: {tensor.dtype} elements cannot stand for {kind}")
        entry = self._entry(name, dtype_name(kind), whole)
        if tensor.numel():
            entry.pending += begin(tensor.detach(), offset * kind.itemsize)

    def merge(self, other: "Fingerprint") -> None:
        """Add another rank's parts. Raises ValueError where the two disagree on a shape or dtype."""
        self.merge_sums(other.sums())

    def merge_sums(self, sums: dict[str, TensorSum]) -> None:
        for name, part in sums.items():
            entry = self._entry(name, part.dtype, part.shape)
            entry.known = (entry.known + part.sum) & MASK

    def sums(self) -> dict[str, TensorSum]:
        """The sums so far, one synchronization with each device for all of them."""
        self._settle()
        return {name: TensorSum(e.dtype, e.shape, e.known) for name, e in self._entries.items()}

    def tensors(self) -> dict[str, str]:
        """A short hex string per tensor, which covers its name, shape, dtype and bits."""
        return {name: _digest([(name, part)], 8) for name, part in self.sums().items()}

    def hexdigest(self) -> str:
        """One short string over all tensors; equal strings mean equal weights."""
        return _digest(sorted(self.sums().items()), 16)

    def __len__(self) -> int:
        return len(self._entries)

    def _entry(self, name: str, dtype: str, shape: tuple[int, ...]) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry(dtype, shape)
        elif (entry.dtype, entry.shape) != (dtype, shape):
            raise ValueError(f"{name}: {dtype} {shape} disagrees with {entry.dtype} {entry.shape}")
        return entry

    def _settle(self) -> None:
        by_device: dict[torch.device, list[tuple[_Entry, Tensor]]] = {}
        for entry in self._entries.values():
            for part in entry.pending:
                if isinstance(part, Tensor):
                    by_device.setdefault(part.device, []).append((entry, part))
                else:
                    entry.known += part.result() if isinstance(part, Future) else part
            entry.pending = []
        for pairs in by_device.values():
            values = torch.stack([value for _, value in pairs]).tolist()
            for (entry, _), value in zip(pairs, values, strict=True):
                entry.known += value
        for entry in self._entries.values():
            entry.known &= MASK


def fingerprint_of(tensors: Iterable[tuple[str, Tensor]]) -> Fingerprint:
    """The fingerprint of whole tensors."""
    fingerprint = Fingerprint()
    for name, tensor in tensors:
        fingerprint.add(name, tensor)
    return fingerprint


def _digest(parts: Iterable[tuple[str, TensorSum]], size: int) -> str:
    state = hashlib.blake2b(digest_size=size)
    for name, part in parts:
        state.update(msgspec.json.encode([name, part.dtype, part.shape, part.sum]))
    return state.hexdigest()
