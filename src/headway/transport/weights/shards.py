"""What one rank sends of a tensor: contiguous elements of the whole, with their place."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from headway.core.errors import HeadwayError


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements of `name` from flat index `offset` on. `tensor` has any shape; `shape` is the whole's."""

    name: str
    tensor: Tensor
    offset: int
    shape: tuple[int, ...]

    @property
    def whole(self) -> bool:
        return self.offset == 0 and self.tensor.numel() == prod(self.shape)


def shards(tensors: Iterable[tuple[str, Tensor]], rank: int, ranks: int) -> Iterator[Shard]:
    """What `rank` of `ranks` has to send. Every rank passes the same names in the same order.

    A DTensor sharded over its rows is sent by each rank's rows (one replica of each); whole copies of a tensor
    are dealt out to the ranks in turn. Raises HeadwayError for a DTensor sharded over another dimension.
    """
    for index, (name, tensor) in enumerate(tensors):
        mine = index % ranks == rank
        if _is_dtensor(tensor):
            shard = _local_shard(name, tensor)
        else:
            shard = Shard(name, tensor.detach(), 0, tuple(tensor.shape)) if mine else None
        if shard is not None and (shard.tensor.numel() or (mine and prod(shard.shape) == 0)):
            yield shard


def _is_dtensor(tensor: Tensor) -> bool:
    """Where nobody has loaded the module there are none; loading it takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local_shard(name: str, tensor: Tensor) -> Shard | None:
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
    return Shard(name, local, offsets[0] * row if offsets else 0, tuple(tensor.shape))
