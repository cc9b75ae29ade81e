"""The one linear layer: a weight, and a bank of low-rank adapters beside it."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.models import ops
from headway.models.adapter_rows.blocks import AdapterBlocks, AdapterGate
from headway.models.ops.fp8.blocks import Fp8Blocks
from headway.models.ops.fp8.linear import fp8_linears, fp8_lora_linears, fp8_summands
from headway.models.ops.linear import Scale, prefers_fused
from headway.models.ops.registry import cast, in_triton

FusedGate = float | AdapterBlocks
"""Gates under which a layer with one adapter in training can be one operation."""
_FUSED = (float, AdapterBlocks)


class AdaptersBeside:
    """Adapters of layers over one input, laid out for serving: the first halves of all slots below the layers' weights,
    in one matrix, so that outputs and ranks are one product."""

    def __init__(self) -> None:
        self.whole: Tensor | None = None

    def join(self, linears: Sequence["Linear"]) -> None:
        """Move weights and first halves together, unless they are; not where a layer has a bias, FP8 or no adapter."""
        if not self._fits(linears) or self._joined(linears):
            return
        parts = [linear.weight for linear in linears] + [
            linear.lora_A for linear in linears if linear.lora_A is not None
        ]
        self.whole = torch.cat([part.data for part in parts])
        for part, place in zip(parts, torch.split(self.whole, [len(part) for part in parts]), strict=True):
            part.data = place

    def product(self, linears: Sequence["Linear"], x_TI: Tensor, gate_TR: Tensor) -> Tensor | None:
        """The outputs side by side with their adapters'. None where they were not joined or were moved since, and
        outside serving passes, for this gives no gradients."""
        if self.whole is None or not torch.is_inference_mode_enabled() or not self._joined(linears):
            return None
        outputs = sum(len(linear.weight) for linear in linears)
        both_TN = ops.linear(x_TI, self.whole)
        out_TO, ranks_TN = torch.split(both_TN, [outputs, len(self.whole) - outputs], dim=1)
        ups = [linear.lora_B for linear in linears if linear.lora_B is not None]
        return ops.add_gated_ranks(out_TO, ranks_TN, gate_TR, ups)

    def _fits(self, linears: Sequence["Linear"]) -> bool:
        return all(linear.lora_A is not None and linear.bias is None and not linear.fp8 for linear in linears)

    def _joined(self, linears: Sequence["Linear"]) -> bool:
        """Tell whether the first weight and the last half are where they were put."""
        last = linears[-1].lora_A
        if self.whole is None or last is None or linears[0].weight.data_ptr() != self.whole.data_ptr():
            return False
        return last.data_ptr() == self.whole[len(self.whole) - len(last) :].data_ptr()


class Linear(nn.Module):
    """`lora_A` (ranks, in) and `lora_B` (ranks, out) hold the adapters of all slots, one after the other along
    the rank axis, and are None until `headway.models.adapters.lora` adds them.

    The gate of a forward pass scales every token's ranks: alpha / rank where the slot is the token's own, 0
    elsewhere. So one adapter or many in one batch, trained or served, are the same two matrix products, of
    fixed shape. Without a gate the layer is the base layer and pays nothing.

    All parameters may be of a higher precision than the input: they are cast here, and their gradients come in their
    own precision. With `fp8` the weight's products are in FP8 (`headway.models.fp8`), those of adapters never.
    """

    adaptable = True
    """Adapters may be put beside it."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.lora_A: nn.Parameter | None = None
        self.lora_B: nn.Parameter | None = None
        self.adapter_dropout = 0.0
        self.beside = AdaptersBeside()
        self.fp8, self.takes_fp8 = False, True
        self.quantized: Fp8Blocks | None = None

    @property
    def operand(self) -> Tensor | Fp8Blocks:
        """The weight as products in FP8 take it: quantized once, or to be quantized in every pass."""
        return self.weight if self.quantized is None else self.quantized

    def forward(self, x_TI: Tensor, adapter_gate: AdapterGate = None) -> Tensor:
        if isinstance(adapter_gate, _FUSED) and (outs := _lora_linears([self], x_TI, adapter_gate)):
            return outs[0]
        if (
            isinstance(adapter_gate, Tensor)
            and (adapted_TO := self.beside.product([self], x_TI, adapter_gate)) is not None
        ):
            return adapted_TO
        out_TO = self._fp8(x_TI) if self.fp8 else ops.linear(x_TI, self.weight, self.bias)
        if isinstance(adapter_gate, AdapterBlocks):
            return ops.add_lora_blocks(out_TO, x_TI, adapter_gate.of_layer(self))
        if adapter_gate is None or self.lora_A is None or self.lora_B is None:
            return out_TO
        if self.training and self.adapter_dropout:
            x_TI = F.dropout(x_TI, self.adapter_dropout)
        ranks_TR = F.linear(x_TI, cast(self.lora_A, x_TI.dtype))
        if isinstance(adapter_gate, Tensor):
            return ops.add_gated_ranks(out_TO, ranks_TR, adapter_gate, [self.lora_B])
        return torch.addmm(out_TO, ranks_TR * adapter_gate, cast(self.lora_B, out_TO.dtype))

    def summands(self, x_TI: Tensor, adapter_gate: AdapterGate = None) -> Tensor:
        """The output as `RMSNorm.add_and_norm` takes it in serving passes: (T, out), or parts (S, T, out) of it."""
        if self.fp8 and adapter_gate is None and self.bias is None:
            return fp8_summands(x_TI, self.operand)
        return self(x_TI, adapter_gate)  # type: ignore[no-any-return]  # modules have no types

    def grad_only(self, x_TI: Tensor, adapter_gate: AdapterGate = None) -> Tensor:
        """The output as far as its gradients go: cheaper, where its values are known or of no interest."""
        if isinstance(adapter_gate, _FUSED) and (outs := _lora_linears([self], x_TI, adapter_gate, grad_only=True)):
            return outs[0]
        if adapter_gate is None and self.bias is None:
            return self._fp8(x_TI, grad_only=True) if self.fp8 else ops.linear_grad_only(x_TI, self.weight)
        return self(x_TI, adapter_gate)  # type: ignore[no-any-return]  # modules have no types

    def _fp8(self, x_TI: Tensor, *, grad_only: bool = False) -> Tensor:
        out_TO = fp8_linears(x_TI, [self.operand], grad_only)
        return out_TO if self.bias is None else out_TO + cast(self.bias, out_TO.dtype)


def _lora_linears(
    linears: Sequence[Linear], x_TI: Tensor, gate: FusedGate, *, grad_only: bool = False
) -> Sequence[Tensor] | None:
    """The output of each as one operation, where all have one adapter to train beside a frozen weight."""
    fused = _fp8_lora(linears, x_TI, gate, grad_only=grad_only)
    if fused is not None:
        return torch.split(fused, [len(linear.weight) for linear in linears], dim=-1)
    if (parts := _lora_parts(linears, gate)) is None:
        return None
    return ops.lora_linears(x_TI, [linear.weight for linear in linears], *parts, grad_only)


def _fp8_lora(
    linears: Sequence[Linear],
    x_TI: Tensor,
    gate: FusedGate,
    *,
    grad_only: bool = False,
    joined: Fp8Blocks | None = None,
) -> Tensor | None:
    """The outputs in FP8, side by side, where the layers are all in FP8 and have adapters to train."""
    if not all(linear.fp8 for linear in linears) or (parts := _lora_parts(linears, gate)) is None:
        return None
    weights = [linear.operand for linear in linears] if joined is None else [joined]
    return fp8_lora_linears(x_TI, weights, *parts, grad_only)


def _lora_parts(linears: Sequence[Linear], gate: FusedGate) -> tuple[list[Tensor], list[Tensor], Scale] | None:
    """A and B of each layer and their scale, where all have one adapter to train beside a frozen weight."""
    for linear in linears:
        if linear.bias is not None or linear.weight.requires_grad or (linear.training and linear.adapter_dropout):
            return None
    if isinstance(gate, AdapterBlocks):
        return gate.joined(linears)
    downs, ups = ([getattr(linear, half) for linear in linears] for half in ("lora_A", "lora_B"))
    return None if any(half is None for half in (*downs, *ups)) else (downs, ups, gate)


class FusedProjections:
    """Linear layers over one input, each with its own parameters. `join` lays these side by side in memory, and
    then a serving pass is one matrix product. Not a module: the parameters belong to the layers.

    `wide`: outputs in float32 where neither adapters nor FP8 are in the way, for what magnifies what is rounded."""

    def __init__(self, *linears: Linear, wide: bool = False) -> None:
        self.wide = wide
        self.joined: Tensor | None = None
        self.beside = AdaptersBeside()
        self.fp8 = False
        self.quantized: Fp8Blocks | None = None
        self.linears = linears
        self._sizes = [linear.weight.shape[0] for linear in linears]
        self._biased = any(linear.bias is not None for linear in linears)

    def __call__(self, x_TI: Tensor, adapter_gate: AdapterGate = None) -> Sequence[Tensor]:
        """The output of each."""
        if self.fp8:
            return torch.split(self.fused(x_TI, adapter_gate), self._sizes, dim=-1)
        if adapter_gate is None and (joined := self.serving()) is not None:
            out_TO = ops.wide_linears(x_TI, [joined])[0] if self.wide else ops.linear(x_TI, joined)
            return torch.split(out_TO, self._sizes, dim=-1)
        if isinstance(adapter_gate, _FUSED) and (outs := _lora_linears(self.linears, x_TI, adapter_gate)):
            return outs
        if isinstance(adapter_gate, Tensor):
            adapted_TO = self.beside.product(self.linears, x_TI, adapter_gate)
            if adapted_TO is not None:
                return torch.split(adapted_TO, self._sizes, dim=-1)
        if adapter_gate is None and not self._biased:
            products = ops.wide_linears if self.wide else ops.linears
            return products(x_TI, [linear.weight for linear in self.linears])
        return [linear(x_TI, adapter_gate) for linear in self.linears]

    def prefers_fused(self, x_TI: Tensor, adapter_gate: AdapterGate = None) -> bool:
        """Tell if `fused` is the faster way, in training."""
        if self.fp8:
            return in_triton(x_TI) and not torch.is_inference_mode_enabled()
        return adapter_gate is None and not self._biased and prefers_fused(x_TI, self.linears[0].weight)

    def fused(self, x_TI: Tensor, adapter_gate: AdapterGate = None) -> Tensor:
        """The outputs side by side in one tensor."""
        if not self.fp8:
            return ops.fused_linears(x_TI, [linear.weight for linear in self.linears])
        if adapter_gate is None and not self._biased:
            own = [linear.operand for linear in self.linears] if self.quantized is None else [self.quantized]
            return fp8_linears(x_TI, own)
        if isinstance(adapter_gate, float):
            out_TO = _fp8_lora(self.linears, x_TI, adapter_gate, joined=self.quantized)
            if out_TO is not None:
                return out_TO
        return torch.cat([linear(x_TI, adapter_gate) for linear in self.linears], -1)

    def join(self) -> None:
        """Move the weights together, unless they are. Layers with a bias or in FP8 stay as they are."""
        if self._biased or self.fp8:
            return
        if self.joined is not None and self.joined.data_ptr() == self.linears[0].weight.data_ptr():
            return
        self.joined = torch.cat([linear.weight.data for linear in self.linears])
        for linear, part in zip(self.linears, torch.split(self.joined, self._sizes), strict=True):
            linear.weight.data = part

    def join_adapters(self) -> None:
        """Move the first halves of adapters below the weights, where all layers have them."""
        if self.joined is not None:
            self.beside.join(self.linears)
            if self.beside.whole is not None:
                self.joined = self.beside.whole[: sum(self._sizes)]

    def serving(self) -> Tensor | None:
        """All weights, one below the other. None where they were not joined or were moved since, as `nn.Module.to`
        does, and outside serving passes, for this gives no gradients."""
        joined = self.joined
        if joined is None or not torch.is_inference_mode_enabled():
            return None
        return joined if joined.data_ptr() == self.linears[0].weight.data_ptr() else None


def fused_projections(model: nn.Module) -> Iterator[FusedProjections]:
    """Find the projections of a model's layers, which modules hold under the name `projections`."""
    for module in model.modules():
        if isinstance(projections := getattr(module, "projections", None), FusedProjections):
            yield projections


def join_adapters(model: nn.Module) -> None:
    """Lay out the adapters of a model for serving on a GPU, each time that there may be new ones."""
    together: set[Linear] = set()
    for projections in fused_projections(model):
        projections.join_adapters()
        together.update(projections.linears)
    for module in model.modules():
        if isinstance(module, Linear) and module not in together:
            module.beside.join([module])
