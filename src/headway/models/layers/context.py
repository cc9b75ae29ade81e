"""Values that all layers of a forward pass share, computed once."""

from dataclasses import dataclass

from torch import Tensor

from headway.models.packed import AttentionPlan


@dataclass(slots=True)
class ForwardContext:
    """`cos` and `sin` are (T, 1, head size), for rotary positions; `sin` carries the sign of the rotation.

    `adapter_gate` scales the adapters' ranks per token (see `layers.linear`); None switches adapters off.

    A plain object and not bare tensors, so that FSDP, which casts a block's tensor arguments to a lower precision,
    leaves the rotary tables alone.
    """

    plan: AttentionPlan
    cos: Tensor
    sin: Tensor
    adapter_gate: Tensor | float | None = None
