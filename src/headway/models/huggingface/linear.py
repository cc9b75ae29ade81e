"""Linear layers inside Hugging Face's modules, with adapters beside them."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from headway.models.adapter_rows.blocks import AdapterGate
from headway.models.layers.linear import Linear


@dataclass(slots=True)
class SharedPass:
    """Values of a pass for all linear layers, which modules of transformers do not hand on: the gate of adapters, and
    the precision of computation (None: the weights' own)."""

    adapter_gate: Tensor | float | None = None
    compute_dtype: torch.dtype | None = None


class ModuleLinear(Linear):
    """Takes the place of an `nn.Linear`, with its parameters, and inputs of (…, T, in)."""

    def __init__(self, replaced: nn.Linear, shared: SharedPass) -> None:
        with torch.device("meta"):
            super().__init__(replaced.in_features, replaced.out_features)
        self.in_features, self.out_features = replaced.in_features, replaced.out_features
        self.weight, self.bias = cast(nn.Parameter, replaced.weight), cast(nn.Parameter | None, replaced.bias)
        self._shared = shared

    def forward(self, x: Tensor, adapter_gate: AdapterGate = None) -> Tensor:
        shared = self._shared
        x_TI = x.flatten(0, -2)
        x_TI = x_TI if shared.compute_dtype is None else x_TI.to(shared.compute_dtype)
        return super().forward(x_TI, shared.adapter_gate).view(*x.shape[:-1], -1)


def replace_linears(module: nn.Module, shared: SharedPass) -> None:
    """Put a `ModuleLinear` in the place of each plain linear layer inside `module`."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, ModuleLinear(child, shared))
