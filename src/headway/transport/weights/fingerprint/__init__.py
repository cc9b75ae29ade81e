"""Fingerprints of weights: a checksum of the bit patterns per tensor, additive over any sharding.

Ranks fingerprint the shards they hold and add the results up, without gathering a tensor. Any flipped bit, swapped
pair of elements, renamed, reshaped or retyped tensor changes the result; `checksum` says why.
"""

import hashlib
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from math import prod
from operator import itemgetter

import msgspec
import torch
from torch import Tensor

from headway.transport.weights.fingerprint.device import DeviceCount, in_one_pass
from headway.transport.weights.fingerprint.host import begin
from headway.transport.weights.fingerprint.reference import Tally

_AT_ONCE = 1024
"""Parts that are counted before their results are worked up together, which bounds what they hold."""


class TensorSum(msgspec.Struct, frozen=True, array_like=True):
    """One whole tensor's share of a fingerprint, ready for the wire."""

    dtype: str
    shape: tuple[int, ...]
    sum: int
    keyed: int


class ShardSum(msgspec.Struct, frozen=True):
    """What a rank knows of a tensor, of which others may hold the rest."""

    dtype: str
    shape: tuple[int, ...]
    tally: Tally


@dataclass(slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    tally: Tally = field(default_factory=Tally)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Fingerprint:
    """Collects tensors or shards of them, in any order. Results stay on their device until they are asked for."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._pending: list[tuple[_Entry, Future[Tally]]] = []
        self._on_device: dict[torch.device, DeviceCount[_Entry]] = {}

    def add(
        self,
        name: str,
        tensor: Tensor,
        offset: int = 0,
        shape: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
        copy: Tensor | None = None,
    ) -> None:
        """Count `tensor`: all of `name`, or its elements from flat index `offset` on where `shape` is the whole's.

        `dtype`, where given, is what elements are cast to first. `copy`, contiguous memory of as many bytes anywhere,
        gets what is counted on the way. Raises ValueError where dtype or shape disagree with an earlier shard's.
        Neither may `tensor` change nor is `copy` complete before `settle`, which also happens when sums are asked for.
        """
        whole = tuple(tensor.shape if shape is None else shape)
        kind = tensor.dtype if dtype is None else dtype
        entry = self._entry(name, dtype_name(kind), whole)
        count, at = tensor.numel(), offset * kind.itemsize
        if not count:
            return
        if copy is not None and not (tensor.is_cpu and copy.is_cpu):
            copy = copy if copy.dtype is kind else copy.view(kind)
            if not in_one_pass(tensor, copy, at):
                tensor = tensor.detach().to(kind)
                copy.view(tensor.shape).copy_(tensor, non_blocking=True)
                tensor, copy = (tensor if copy.is_cpu else copy), None
        if not tensor.is_cpu:
            data = tensor if copy is not None else tensor.to(kind).contiguous()
            self._counts(tensor.device).add(entry, data, at, copy, last=offset + count == prod(whole))
            return
        for part in begin(tensor.to(kind).contiguous(), at, copy):
            if isinstance(part, Tally):
                entry.tally.merge(part)
            else:
                self._pending.append((entry, part))
        if len(self._pending) >= _AT_ONCE:
            self.settle()

    def merge(self, other: "Fingerprint") -> None:
        """Add another rank's parts. Raises ValueError where the two disagree on a shape or dtype."""
        self.merge_parts(other.parts())

    def merge_parts(self, parts: dict[str, ShardSum]) -> None:
        for name, part in parts.items():
            self._entry(name, part.dtype, part.shape).tally.merge(part.tally)

    def parts(self) -> dict[str, ShardSum]:
        """What is known of each tensor, for another rank to merge."""
        self.settle()
        return {name: ShardSum(e.dtype, e.shape, e.tally) for name, e in self._entries.items()}

    def sums(self) -> dict[str, TensorSum]:
        """What the tensors come to, taken for whole."""
        self.settle()
        return {name: TensorSum(e.dtype, e.shape, *e.tally.total()) for name, e in self._entries.items()}

    def tensors(self) -> dict[str, str]:
        """A short hex string per tensor, which covers its name, shape, dtype and bits."""
        return {name: _digest([(name, part)], 8) for name, part in self.sums().items()}

    def hexdigest(self) -> str:
        """One short string over all tensors; equal strings mean equal weights."""
        return digest_of(self.sums())

    def settle(self) -> None:
        """Wait until all that was added is counted and copied, with one synchronization for each device."""
        for entry, part in self._pending:
            entry.tally.merge(part.result())
        self._pending = []
        for counts in self._on_device.values():
            for entry, tally in counts.fetch():
                entry.tally.merge(tally)

    def __len__(self) -> int:
        return len(self._entries)

    def _counts(self, device: torch.device) -> DeviceCount[_Entry]:
        counts = self._on_device.get(device)
        if counts is None:
            counts = self._on_device[device] = DeviceCount()
        return counts

    def _entry(self, name: str, dtype: str, shape: tuple[int, ...]) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry(dtype, shape)
        elif (entry.dtype, entry.shape) != (dtype, shape):
            raise ValueError(f"{name}: {dtype} {shape} disagrees with {entry.dtype} {entry.shape}")
        return entry


def fingerprint_of(tensors: Iterable[tuple[str, Tensor]]) -> Fingerprint:
    """The fingerprint of whole tensors."""
    fingerprint = Fingerprint()
    for name, tensor in tensors:
        fingerprint.add(name, tensor)
    return fingerprint


def digest_of(sums: dict[str, TensorSum]) -> str:
    """The fingerprint of tensors of which the sums are known."""
    return _digest(sorted(sums.items(), key=itemgetter(0)), 16)


def _digest(parts: Iterable[tuple[str, TensorSum]], size: int) -> str:
    state = hashlib.blake2b(digest_size=size)
    for name, part in parts:
        state.update(msgspec.json.encode([name, part]))
    return state.hexdigest()
