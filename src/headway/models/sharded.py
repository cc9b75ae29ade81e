"""Parameters that are sharded over ranks (DTensors). Their module takes seconds to import, so it is left alone
until one is met."""

from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def gathered(parameter: Tensor) -> Tensor:
    """Return the whole parameter, detached. Where it is sharded, all ranks must call this alike."""
    tensor: Any = parameter.detach()
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def fill_sharded(parameter: Tensor, whole: Tensor) -> None:
    """Fill from a tensor that all ranks have: each keeps its share, so none has to send."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    parameter.copy_(distribute_tensor(whole.to(parameter.device), mesh, placements, src_data_rank=None))
