"""Trading compute and CPU memory for device memory: which activations are kept, recomputed or moved away."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from headway.config.trainer import ActivationSettings
from headway.models.layers.block import Block
from headway.trainer.memory.recompute import RecomputedBlock


def checkpoint_blocks(blocks: Sequence[Block], settings: ActivationSettings) -> None:
    """Make blocks recompute their activations in backward. Parameters and their names stay as they are.

    `full` keeps a block's input alone. `selective` also keeps what attention returned: on long sequences most of a
    block's time for a small part of its memory.
    """
    if settings.checkpoint == "off":
        return
    kept = 0
    if settings.checkpoint == "selective":
        kept = len(blocks) if settings.attention_layers is None else settings.attention_layers
    for number, block in enumerate(reversed(blocks)):
        block.forward = RecomputedBlock(block, keep_attention=number < kept)  # type: ignore[method-assign]  # it is one


class offloaded(saved_tensors_hooks):  # noqa: N801 - used like a function, as torch's own save_on_cpu
    """Inside, tensors saved for backward live in CPU memory: what checkpointed blocks keep."""

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
