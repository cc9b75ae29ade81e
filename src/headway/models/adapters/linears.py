"""The adapter bank's memory: two matrices beside each adapted linear layer, with slots along the rank axis."""

import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from headway.core.errors import HeadwayError, UsageError
from headway.models.adapters.bank import AdapterBank
from headway.models.build import fill_uniform
from headway.models.decoder import DecoderLM
from headway.models.layers.linear import Linear


def bank_of(model: DecoderLM) -> AdapterBank:
    if model.adapters is None:
        raise HeadwayError("the model has no adapters")
    return model.adapters


def adapted_linears(model: nn.Module) -> Iterator[tuple[str, Linear, nn.Parameter, nn.Parameter]]:
    """Iterate over the linear layers that have adapters: name, layer, A (ranks, in), B (ranks, out)."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.lora_A is not None and module.lora_B is not None:
            yield name, module, module.lora_A, module.lora_B


def resize_bank(model: DecoderLM, targets: Collection[str], *, rank: int, slots: int, default: int | None) -> None:
    """Give the bank these slots of this rank (neither may shrink) in layers called one of `targets` and in those that
    have adapters already. Adapters that it holds stay; new slots are zero."""
    old = model.adapters
    found = 0
    for name, module in model.model.named_modules():
        if isinstance(module, Linear) and (module.lora_A is not None or name.rpartition(".")[2] in targets):
            old_rank = 0 if old is None else old.rank
            inputs, outputs = module.weight.shape[1], module.weight.shape[0]
            module.lora_A = _resized(module.lora_A, module.weight, inputs, old_rank, rank, slots)
            module.lora_B = _resized(module.lora_B, module.weight, outputs, old_rank, rank, slots)
            found += 1
    if not found:
        raise UsageError(f"no linear layer of the model is called any of: {', '.join(targets)}")
    scales = [] if old is None else old.scales
    model.adapters = AdapterBank(rank, scales + [0.0] * (slots - len(scales)), default)


def drop_bank(model: DecoderLM) -> None:
    for _, linear, _, _ in adapted_linears(model):
        linear.lora_A = linear.lora_B = None
    model.adapters = None


def init_adapters(model: DecoderLM, seed: int) -> None:
    """Set A to random numbers, as PEFT spreads them, and B to zero: the model computes what it did without adapters."""
    with torch.no_grad():
        for name, _, a, b in adapted_linears(model):
            fill_uniform(a, 1 / math.sqrt(a.shape[1]), f"{seed}/{name}.lora_A")
            b.zero_()


def _resized(old: nn.Parameter | None, weight: Tensor, size: int, old_rank: int, rank: int, slots: int) -> nn.Parameter:
    new = torch.zeros(slots * rank, size, dtype=weight.dtype, device=weight.device)
    if old is not None:
        kept = old.detach().view(-1, old_rank, size)
        new.view(slots, rank, size)[: len(kept), :old_rank] = kept
    return nn.Parameter(new, requires_grad=old is not None and old.requires_grad)
