"""Saved activations in CPU memory instead of the device's."""

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class offloaded(saved_tensors_hooks):  # noqa: N801 - used like a function, as torch's own save_on_cpu
    """Inside, tensors saved for backward live in CPU memory: what recomputed blocks keep."""

    def __init__(self) -> None:
        super().__init__(_to_cpu, _from_cpu)


def _to_cpu(tensor: Tensor) -> tuple[torch.device, Tensor]:
    if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point() or not tensor.is_cuda:
        return tensor.device, tensor
    packed = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    packed.copy_(tensor, non_blocking=True)
    return tensor.device, packed


def _from_cpu(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor.to(device, non_blocking=True)
