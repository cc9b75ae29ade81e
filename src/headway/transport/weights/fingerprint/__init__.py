"""Fingerprints of weights: a checksum of the bit patterns per tensor, additive over any sharding.

Ranks fingerprint the shards they hold and add the results up, without gathering a tensor. Any flipped bit, swapped
pair of elements, renamed, reshaped or retyped tensor changes the result; `reference` says why.
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

from headway.transport.weights.fingerprint.device import DeviceCounter, can_copy_and_count
from headway.transport.weights.fingerprint.host import count_on_host
from headway.transport.weights.fingerprint.reference import Checksum

_MAX_PENDING = 1024
"""Parts being counted by threads before their results are collected, which bounds the memory they hold."""


class TensorSum(msgspec.Struct, frozen=True, array_like=True):
    """One whole tensor's share of a fingerprint, ready for the wire."""

    dtype: str
    shape: tuple[int, ...]
    sum: int
    keyed: int


@dataclass(slots=True)
class ShardSum:
    """The checksum of what a rank holds of a tensor, whose whole has `shape`."""

    dtype: str
    shape: tuple[int, ...]
    checksum: Checksum = field(default_factory=Checksum)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Fingerprint:
    """Collects tensors or shards of them, in any order. Results stay on their device until they are asked for."""

    def __init__(self) -> None:
        self._shards: dict[str, ShardSum] = {}
        self._pending: list[tuple[ShardSum, Future[Checksum]]] = []
        self._counters: dict[torch.device, DeviceCounter[ShardSum]] = {}

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

        Elements are cast to `dtype` first, where it is given. What is counted is also written to `copy`, contiguous
        memory of as many bytes on any device. Raises ValueError where dtype or shape disagree with an earlier shard's.
        Until `wait`, which asking for sums includes, `tensor` must not change and `copy` is not complete.
        """
        whole = tuple(tensor.shape if shape is None else shape)
        kind = tensor.dtype if dtype is None else dtype
        shard = self._shard(name, dtype_name(kind), whole)
        count, at = tensor.numel(), offset * kind.itemsize
        if not count:
            return
        if copy is not None and not (tensor.is_cpu and copy.is_cpu):
            copy = copy if copy.dtype is kind else copy.view(kind)
            if not can_copy_and_count(tensor, copy, at):
                tensor = tensor.detach().to(kind)
                copy.view(tensor.shape).copy_(tensor, non_blocking=True)
                tensor, copy = (tensor if copy.is_cpu else copy), None
        if not tensor.is_cpu:
            data = tensor if copy is not None else tensor.to(kind).contiguous()
            self._counter(tensor.device).add(shard, data, at, copy, last=offset + count == prod(whole))
            return
        for part in count_on_host(tensor.to(kind).contiguous(), at, copy):
            if isinstance(part, Checksum):
                shard.checksum.merge(part)
            else:
                self._pending.append((shard, part))
        if len(self._pending) >= _MAX_PENDING:
            self.wait()

    def merge(self, shards: dict[str, ShardSum]) -> None:
        """Add another rank's `shards()`. Raises ValueError where the two disagree on a shape or dtype."""
        for name, shard in shards.items():
            self._shard(name, shard.dtype, shard.shape).checksum.merge(shard.checksum)

    def shards(self) -> dict[str, ShardSum]:
        """The checksums of what was added, for another rank to merge."""
        self.wait()
        return self._shards

    def sums(self) -> dict[str, TensorSum]:
        """The checksums of all tensors, taken for whole."""
        self.wait()
        return {name: TensorSum(s.dtype, s.shape, *s.checksum.total()) for name, s in self._shards.items()}

    def hexdigest(self) -> str:
        """One short string over all tensors; equal strings mean equal weights."""
        return digest_of(self.sums())

    def wait(self) -> None:
        """Wait until everything that was added is counted and copied, with one synchronization for each device."""
        for shard, part in self._pending:
            shard.checksum.merge(part.result())
        self._pending = []
        for counter in self._counters.values():
            for shard, checksum in counter.fetch():
                shard.checksum.merge(checksum)

    def _counter(self, device: torch.device) -> DeviceCounter[ShardSum]:
        counter = self._counters.get(device)
        if counter is None:
            counter = self._counters[device] = DeviceCounter()
        return counter

    def _shard(self, name: str, dtype: str, shape: tuple[int, ...]) -> ShardSum:
        shard = self._shards.get(name)
        if shard is None:
            shard = self._shards[name] = ShardSum(dtype, shape)
        elif (shard.dtype, shard.shape) != (dtype, shape):
            raise ValueError(f"{name}: {dtype} {shape} disagrees with {shard.dtype} {shard.shape}")
        return shard


def fingerprint_of(tensors: Iterable[tuple[str, Tensor]]) -> Fingerprint:
    """Fingerprint whole tensors."""
    fingerprint = Fingerprint()
    for name, tensor in tensors:
        fingerprint.add(name, tensor)
    return fingerprint


def digest_of(sums: dict[str, TensorSum]) -> str:
    """The fingerprint of tensors whose checksums are known."""
    state = hashlib.blake2b(digest_size=16)
    for name, part in sorted(sums.items(), key=itemgetter(0)):
        state.update(msgspec.json.encode([name, part]))
    return state.hexdigest()
