"""Shards: the contiguous elements of a tensor that one process sends, and where they belong in the whole."""

import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from headway.base.errors import HeadwayError

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements of `name` from flat index `offset` on. `tensor` has any shape; `shape` is the whole's. They are sent as
    `cast` where that is given."""

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
        """Elements of the whole, as a DTensor counts."""
        return prod(self.shape)


NamedTensors = Iterable[tuple[str, Tensor | Shard]]
"""Whole tensors, DTensors, or what a process holds of a tensor; the same names in the same order on every process."""


def local_shards(
    tensors: NamedTensors,
    rank: int,
    processes: int,
    dtype: torch.dtype | None = None,
    uncast: Collection[str] = (),
) -> Iterator[Shard]:
    """Yield what process `rank` of the `processes` that publish has to send, as `dtype` where given, not cast yet. The
    tensors named `uncast` keep their own.

    The mesh and the placements of a DTensor say who holds which rows: each process sends its own, and of replicas the
    first one sends. Whole copies of a tensor are dealt out to the processes in turn. Raises HeadwayError for a DTensor
    sharded over another dimension.
    """
    for index, (name, tensor) in enumerate(tensors):
        mine, cast = index % processes == rank, None if name in uncast else dtype
        if isinstance(tensor, Shard):
            shard: Shard | None = replace(tensor, cast=cast)
        elif _is_dtensor(tensor):
            shard = _shard_of(name, tensor, cast)
        else:
            whole = tensor.detach() if tensor.requires_grad else tensor
            shard = Shard(name, whole, 0, tuple(tensor.shape), cast) if mine else None
        if shard is not None and (shard.tensor.numel() or (mine and prod(shard.shape) == 0)):
            yield shard


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """`parameter[at]`, sent as `name`, with the last two axes swapped where it is `transposed`."""

    name: str
    at: Index = ()
    transposed: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        part = tensor[self.at] if self.at else tensor
        return part.transpose(-2, -1) if self.transposed else part


def split_parameter(tensor: Tensor, parts: Iterable[ParameterPart]) -> Iterator[tuple[str, Tensor | Shard]]:
    """Yield each part of `tensor` under its name; of a DTensor what this process holds of it, which may be nothing."""
    if not _is_dtensor(tensor):
        yield from ((part.name, part.of(tensor)) for part in parts)
        return
    held = _shard_of("a parameter in parts", tensor)
    whole = torch.empty(tensor.shape, device="meta")
    local = held.tensor if held is not None else torch.empty(0, *tensor.shape[1:], dtype=tensor.dtype)
    first_row = held.offset // max(prod(tensor.shape[1:]), 1) if held is not None else 0
    for part in parts:
        yield part.name, _select(part, local, first_row, tuple(part.of(whole).shape))


def _select(part: ParameterPart, local: Tensor, first_row: int, shape: tuple[int, ...]) -> Shard:
    """Select what rows `local` of a parameter, from `first_row` on, hold of a part of it, of shape `shape`."""
    rows, *rest = part.at or (slice(0, shape[0]),)
    if isinstance(rows, int):
        inside = first_row <= rows < first_row + len(local)
        mine, offset = local[rows - first_row][tuple(rest)] if inside else local[:0], 0
    else:
        start, end = max(rows.start, first_row), min(rows.stop, first_row + len(local))
        mine = local[start - first_row : max(start, end) - first_row][(slice(None), *rest)]
        offset = (start - rows.start) * prod(shape[1:]) if len(mine) else 0
        if part.transposed and len(shape) < 3:
            raise HeadwayError(f"{part.name}: rows of a matrix that is sent transposed must not be sharded")
    if part.transposed and mine.numel():
        mine = mine.transpose(-2, -1)
    return Shard(part.name, mine, offset, shape)


def _is_dtensor(tensor: Tensor) -> bool:
    """Tell if a tensor is a DTensor. Until their module is imported, which takes a second, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _shard_of(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Shard | None:
    """The rows of a DTensor that this process has to send; None where another replica sends them."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    from headway.models.sharded import rows_here

    assert isinstance(tensor, DTensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    # Meshes that don't span all processes hold copies of each other: the one with the first process sends.
    if coordinate is None or 0 not in mesh.mesh:
        return None
    if any(p.is_replicate() and c for p, c in zip(placements, coordinate, strict=True)):
        return None
    row = prod(tensor.shape[1:])
    local = tensor.to_local().detach()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    return Shard(name, local, rows_here(tensor).start * row, tuple(tensor.shape), dtype)
