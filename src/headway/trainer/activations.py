"""Trading compute and CPU memory for device memory: which activations are kept, recomputed or moved away."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def checkpoint_block(block: nn.Module, mode: Literal["selective", "full"]) -> None:
    """Make `block` recompute its activations in backward. Parameters and their names stay as they are.

    `full` keeps a block's input alone. `selective` also keeps what attention returned: on long sequences most of a
    block's time for a small part of its memory.
    """
    forward: Callable[..., Any] = block.forward
    extra: dict[str, Any] = {}
    if mode == "selective":
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)

    def recomputing(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **extra)

    block.forward = recomputing


def _keep_attention(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.__name__.split(".")[0] if hasattr(operation, "__name__") else str(operation)
    keep = "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class offloaded(saved_tensors_hooks):  # noqa: N801 - used like a function, as torch's own save_on_cpu
    """Inside, tensors saved for backward live in CPU memory: with full checkpointing, the inputs of the blocks.

    Weights stay where they are, since they are there anyway.
    """

    def __init__(self) -> None:
        super().__init__(_to_cpu, _from_cpu)


def _to_cpu(tensor: Tensor) -> tuple[torch.device, Tensor]:
    if tensor.is_leaf or not tensor.is_floating_point() or not tensor.is_cuda:
        return tensor.device, tensor
    packed = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    packed.copy_(tensor, non_blocking=True)
    return tensor.device, packed


def _from_cpu(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor.to(device, non_blocking=True)
