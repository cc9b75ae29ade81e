"""Parameters that are sharded over ranks (DTensors). Their module takes seconds to import, so it is left alone
until one is met."""

from typing import Any

from torch import Tensor

from headway.base.errors import HeadwayError


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def local_part(parameter: Tensor) -> Tensor:
    """The part that this rank holds; its gradient is the parameter's here."""
    tensor: Any = parameter
    part: Tensor = tensor.to_local() if is_sharded(parameter) else tensor
    return part


def gathered(parameter: Tensor) -> Tensor:
    """Return the whole parameter, detached. Where it is sharded, all ranks must call this alike."""
    tensor: Any = parameter.detach()
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def rows_here(tensor: Tensor) -> slice:
    """The rows of `tensor` that this rank holds, which are neighbours: all of them where it is not sharded.

    Raises HeadwayError for a DTensor sharded over another dimension.
    """
    if not is_sharded(tensor):
        return slice(0, len(tensor))
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    # FSDP's shards of what is split already are strided ones, which do not call themselves shards.
    if any(p.is_partial() or getattr(p, "dim", 0) != 0 for p in placements):
        raise HeadwayError(f"a tensor can only be sharded over its rows, not as {placements}")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return slice(offset[0], offset[0] + shape[0])


def fill_part(parameter: Tensor, at: tuple[int | slice, ...], part: Tensor) -> None:
    """Set `parameter[at]` to `part`, which every rank has: each copies what it holds of it, so none has to send."""
    held, rows = local_part(parameter.detach()), rows_here(parameter)
    first, *rest = at or (slice(None),)
    if isinstance(first, int):
        if rows.start <= first < rows.stop:
            held[(first - rows.start, *rest)].copy_(part)
        return
    begin, end, _ = first.indices(len(parameter))
    start, stop = max(begin, rows.start), min(end, rows.stop)
    if start < stop:
        held[(slice(start - rows.start, stop - rows.start), *rest)].copy_(part[start - begin : stop - begin])
