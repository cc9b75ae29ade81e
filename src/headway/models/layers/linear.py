"""The one linear layer: a weight, and a bank of low-rank adapters beside it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """`lora_A` (ranks, in) and `lora_B` (ranks, out) hold the adapters of all slots, one after the other along
    the rank axis, and are None until `headway.models.lora` adds them.

    The gate of a forward pass scales every token's ranks: alpha / rank where the slot is the token's own, 0
    elsewhere. So one adapter or many in one batch, trained or served, are the same two matrix products, of
    fixed shape. Without a gate the layer is the base layer and pays nothing.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.lora_A: nn.Parameter | None = None
        self.lora_B: nn.Parameter | None = None
        self.adapter_dropout = 0.0

    def forward(self, x_TI: Tensor, adapter_gate: Tensor | float | None = None) -> Tensor:
        out_TO = F.linear(x_TI, self.weight, self.bias)
        if adapter_gate is None or self.lora_A is None or self.lora_B is None:
            return out_TO
        if self.training and self.adapter_dropout:
            x_TI = F.dropout(x_TI, self.adapter_dropout)
        ranks_TR = F.linear(x_TI, self.lora_A) * adapter_gate
        return torch.addmm(out_TO, ranks_TR.to(out_TO.dtype), self.lora_B)
