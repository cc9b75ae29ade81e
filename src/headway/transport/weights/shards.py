"""What one rank sends of a tensor: contiguous elements of the whole, with their place."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from headway.core.errors import HeadwayError
from headway.transport.weights.base import NamedTensors


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements of `name` from flat index `offset` on. `tensor` has any shape; `shape` is the whole's. `cast` is the
    dtype that they are sent as, where that isn't their own."""

    name: str
    tensor: Tensor
    offset: int
    shape: tuple[int, ...]
    cast: torch.dtype | None = None

    @property
    def whole(self) -> bool:
        return self.offset == 0 and self.tensor.numel() == prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype if self.cast is None else self.cast

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """Of the whole, as a DTensor counts."""
        return prod(self.shape)


def shards(tensors: NamedTensors, rank: int, ranks: int, dtype: torch.dtype | None = None) -> Iterator[Shard]:
    """What `rank` of `ranks` has to send. Every rank passes the same names in the same order.

    A DTensor sharded over its rows is sent by each rank's rows (one replica of each); whole copies of a tensor
    are dealt out to the ranks in turn. Raises HeadwayError for a DTensor sharded over another dimension. All are sent
    as `dtype`, where it is given, and not cast yet.
    """
    for index, (name, tensor) in enumerate(tensors):
        mine = index % ranks == rank
        if isinstance(tensor, Shard):
            shard: Shard | None = Shard(tensor.name, tensor.tensor, tensor.offset, tensor.shape, dtype)
        elif _is_dtensor(tensor):
            shard = _local_shard(name, tensor, dtype)
        else:
            whole = tensor.detach() if tensor.requires_grad else tensor
            shard = Shard(name, whole, 0, tuple(tensor.shape), dtype) if mine else None
        if shard is not None and (shard.tensor.numel() or (mine and prod(shard.shape) == 0)):
            yield shard


At = tuple[int | slice, ...]


def parts_of(tensor: Tensor, parts: Iterable[tuple[str, At]]) -> Iterator[tuple[str, Tensor | Shard]]:
    """`tensor[at]` under each name: of a DTensor what this rank holds of it, which may be nothing. None is gathered."""
    if not _is_dtensor(tensor):
        yield from ((name, tensor[at]) for name, at in parts)
        return
    held = _local_shard("a parameter in parts", tensor)
    shadow = torch.empty(tensor.shape, device="meta")
    local = held.tensor if held is not None else torch.empty(0, *tensor.shape[1:], dtype=tensor.dtype)
    begin = held.offset // max(prod(tensor.shape[1:]), 1) if held is not None else 0
    for name, at in parts:
        yield name, _cut(name, local, begin, at, tuple(shadow[at].shape))


def _cut(name: str, local: Tensor, begin: int, at: At, shape: tuple[int, ...]) -> Shard:
    """What rows `local` of a parameter, from number `begin` on, hold of its part `at`, whose shape is `shape`."""
    rows, *rest = at
    if isinstance(rows, int):
        inside = begin <= rows < begin + len(local)
        return Shard(name, local[rows - begin][tuple(rest)] if inside else local[:0], 0, shape)
    start, end = max(rows.start, begin), min(rows.stop, begin + len(local))
    if start >= end:
        return Shard(name, local[:0], 0, shape)
    mine = local[start - begin : end - begin][(slice(None), *rest)]
    return Shard(name, mine, (start - rows.start) * prod(shape[1:]), shape)


def _is_dtensor(tensor: Tensor) -> bool:
    """Where nobody has loaded the module there are none; loading it takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local_shard(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Shard | None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(p.is_replicate() and c for p, c in zip(placements, coordinate, strict=True)):
        return None
    if any(p.is_partial() or (p.is_shard() and not p.is_shard(0)) for p in placements):
        raise HeadwayError(f"{name}: can only send tensors sharded over their rows, not {placements}")
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    row = prod(tensor.shape[1:])
    local = tensor.to_local().detach()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    return Shard(name, local, offsets[0] * row if offsets else 0, tuple(tensor.shape), dtype)
