"""The one linear layer: a weight, and a bank of low-rank adapters beside it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.models import ops
from headway.models.ops.linear import prefers_fused


class Linear(nn.Module):
    """`lora_A` (ranks, in) and `lora_B` (ranks, out) hold the adapters of all slots, one after the other along
    the rank axis, and are None until `headway.models.adapters.lora` adds them.

    The gate of a forward pass scales every token's ranks: alpha / rank where the slot is the token's own, 0
    elsewhere. So one adapter or many in one batch, trained or served, are the same two matrix products, of
    fixed shape. Without a gate the layer is the base layer and pays nothing.

    All parameters may be of a higher precision than the input: they are cast here, and their gradients come in their
    own precision.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.lora_A: nn.Parameter | None = None
        self.lora_B: nn.Parameter | None = None
        self.adapter_dropout = 0.0

    def forward(self, x_TI: Tensor, adapter_gate: Tensor | float | None = None) -> Tensor:
        if isinstance(adapter_gate, float) and (outs := _lora_linears([self], x_TI, adapter_gate)):
            return outs[0]
        out_TO = ops.linear(x_TI, self.weight, self.bias)
        if adapter_gate is None or self.lora_A is None or self.lora_B is None:
            return out_TO
        if self.training and self.adapter_dropout:
            x_TI = F.dropout(x_TI, self.adapter_dropout)
        ranks_TR = F.linear(x_TI, self.lora_A.to(x_TI.dtype)) * adapter_gate
        return torch.addmm(out_TO, ranks_TR.to(out_TO.dtype), self.lora_B.to(out_TO.dtype))

    def grad_only(self, x_TI: Tensor, adapter_gate: Tensor | float | None = None) -> Tensor:
        """The output as far as its gradients go: cheaper, where its values are known or of no interest."""
        if isinstance(adapter_gate, float) and (outs := _lora_linears([self], x_TI, adapter_gate, grad_only=True)):
            return outs[0]
        if adapter_gate is None and self.bias is None:
            return ops.linear_grad_only(x_TI, self.weight)
        return self(x_TI, adapter_gate)  # type: ignore[no-any-return]  # modules have no types


def _lora_linears(
    linears: Sequence[Linear], x_TI: Tensor, scale: float, *, grad_only: bool = False
) -> Sequence[Tensor] | None:
    """The output of each as one operation, where all have an adapter to train beside a frozen weight."""
    weights, downs, ups = [], [], []
    for linear in linears:
        dropped = linear.training and linear.adapter_dropout
        if linear.lora_A is None or linear.lora_B is None or linear.bias is not None or dropped:
            return None
        if linear.weight.requires_grad:
            return None
        weights.append(linear.weight)
        downs.append(linear.lora_A)
        ups.append(linear.lora_B)
    return ops.lora_linears(x_TI, weights, downs, ups, scale, grad_only)


class FusedProjections:
    """Linear layers over one input, each with its own parameters. `join` lays these side by side in memory, and
    then a serving pass is one matrix product. Not a module: the parameters belong to the layers."""

    def __init__(self, *linears: Linear) -> None:
        self.joined: Tensor | None = None
        self._linears = linears
        self._sizes = [linear.weight.shape[0] for linear in linears]
        self._biased = any(linear.bias is not None for linear in linears)

    def __call__(self, x_TI: Tensor, adapter_gate: Tensor | float | None = None) -> Sequence[Tensor]:
        """The output of each."""
        if adapter_gate is None and (joined := self.serving()) is not None:
            return torch.split(ops.linear(x_TI, joined), self._sizes, dim=-1)
        if isinstance(adapter_gate, float) and (outs := _lora_linears(self._linears, x_TI, adapter_gate)):
            return outs
        if adapter_gate is None and not self._biased:
            return ops.linears(x_TI, [linear.weight for linear in self._linears])
        return [linear(x_TI, adapter_gate) for linear in self._linears]

    def prefers_fused(self, x_TI: Tensor, adapter_gate: Tensor | float | None = None) -> bool:
        """Tell if `fused` is the faster way, in training."""
        return adapter_gate is None and not self._biased and prefers_fused(x_TI, self._linears[0].weight)

    def fused(self, x_TI: Tensor) -> Tensor:
        """The outputs side by side in one tensor."""
        return ops.fused_linears(x_TI, [linear.weight for linear in self._linears])

    def join(self) -> None:
        """Move the weights together, unless they are. Layers with a bias stay as they are."""
        if self._biased:
            return
        if self.joined is not None and self.joined.data_ptr() == self._linears[0].weight.data_ptr():
            return
        self.joined = torch.cat([linear.weight.data for linear in self._linears])
        for linear, part in zip(self._linears, torch.split(self.joined, self._sizes), strict=True):
            linear.weight.data = part

    def serving(self) -> Tensor | None:
        """All weights, one below the other. None where they were not joined or were moved since, as `nn.Module.to`
        does, and outside serving passes, for this gives no gradients."""
        joined = self.joined
        if joined is None or not torch.is_inference_mode_enabled():
            return None
        return joined if joined.data_ptr() == self._linears[0].weight.data_ptr() else None
