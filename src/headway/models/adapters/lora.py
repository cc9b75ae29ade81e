"""LoRA adapters in the slots of a model's bank: trained, served side by side, merged into the weights."""

import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from headway.base.errors import HeadwayError, UsageError
from headway.config.shared import LoraSettings
from headway.models.adapter_rows.bank import AdapterBank
from headway.models.adapters.adaptable import AdaptableWeight, adaptable_weights, adapters_of
from headway.models.adapters.peft import adapter_pairs, peft_tensors, write_adapter
from headway.models.build import fill_uniform
from headway.models.decoder import DecoderLM
from headway.models.layers.linear import Linear
from headway.models.sharded import gathered


def bank_of(model: DecoderLM) -> AdapterBank:
    if model.adapters is None:
        raise HeadwayError("the model has no adapters")
    return model.adapters


def resize_bank(model: DecoderLM, targets: Collection[str], *, rank: int, slots: int, default: int | None) -> None:
    """Give the bank these slots of this rank (neither may shrink) in layers called one of `targets` and in those that
    have adapters already. Adapters that it holds stay; new slots are zero."""
    old = model.adapters
    found = 0
    for weight in adaptable_weights(model):
        if weight.pair is not None or weight.target in targets:
            old_rank = 0 if old is None else old.rank
            outputs, inputs = weight.weight.shape[-2:]
            a, b = weight.pair or (None, None)
            weight.hold(
                _resized(a, weight.weight, inputs, old_rank, rank, slots),
                _resized(b, weight.weight, outputs, old_rank, rank, slots),
            )
            found += 1
    if not found:
        raise unknown_targets(model, targets)
    scales = [] if old is None else old.scales
    model.adapters = AdapterBank(rank, scales + [0.0] * (slots - len(scales)), default)


def unknown_targets(model: DecoderLM, targets: Collection[str]) -> UsageError:
    """The error for targets of which the model has none."""
    known = sorted({weight.target for weight in adaptable_weights(model)})
    return UsageError(
        f"no linear layer of the model is called any of: {', '.join(targets)}; model.lora.targets can be: "
        f"{', '.join(known) or 'none'}"
    )


def drop_bank(model: DecoderLM) -> None:
    for weight, _, _ in adapters_of(model):
        weight.hold(None, None)
    model.adapters = None


def init_adapters(model: DecoderLM, seed: int) -> None:
    """Set A to random numbers, as PEFT spreads them, and B to zero: the model computes what it did without adapters."""
    for weight, a, b in adapters_of(model):
        init_pair(weight, a, b, seed)


@torch.no_grad()
def init_pair(weight: AdaptableWeight, a: Tensor, b: Tensor, seed: int) -> None:
    """Set the adapter of one weight as `init_adapters` does."""
    fill_uniform(a, 1 / math.sqrt(a.shape[-1]), f"{seed}/{weight.name}.lora_A")
    b.zero_()


def _resized(old: nn.Parameter | None, weight: Tensor, size: int, old_rank: int, rank: int, slots: int) -> nn.Parameter:
    experts = weight.shape[:-2]
    new = torch.zeros(*experts, slots * rank, size, dtype=weight.dtype, device=weight.device)
    if old is not None:
        kept = old.detach().view(*experts, -1, old_rank, size)
        new.view(*experts, slots, rank, size)[..., : kept.shape[-3], :old_rank, :] = kept
    return nn.Parameter(new, requires_grad=old is not None and old.requires_grad)


def apply_lora(model: DecoderLM, settings: LoraSettings, *, slots: int = 1, seed: int = 0) -> None:
    """Freeze the model and give it adapters to train, which change nothing yet. Tokens without an index use slot 0.

    Call it before the model is sharded. On the meta device the adapters stay unset: call `init_adapters` later.
    """
    model.requires_grad_(False)
    resize_bank(model, settings.targets, rank=settings.rank, slots=slots, default=0)
    for slot in range(slots):
        bank_of(model).set_scale(slot, settings.alpha / settings.rank)
    for weight, a, b in adapters_of(model):
        if isinstance(weight.module, Linear):
            weight.module.adapter_dropout = settings.dropout
        elif settings.dropout:
            raise UsageError('model.lora.dropout must be 0 where model.lora.targets has "experts"')
        a.requires_grad_(True)
        b.requires_grad_(True)
    if not model.head_weight().is_meta:
        init_adapters(model, seed)


def reserve_adapters(model: DecoderLM, settings: LoraSettings, slots: int) -> None:
    """Allocate slots to serve `slots` adapters of up to `settings.rank`. Tokens without an index use the base model.

    `load_adapter` allocates by itself; doing so ahead keeps the bank's tensors where they are.
    """
    resize_bank(model, settings.targets, rank=settings.rank, slots=slots, default=None)


def adapter_tensors(model: DecoderLM, slot: int = 0, rank: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the adapter in `slot` under PEFT's names; a sharded one is gathered, and all ranks iterate alike.

    `rank` is the adapter's own, where that is smaller than the bank's and the rest is padding.
    """
    bank = bank_of(model)
    start = slot * bank.rank
    own = slice(start, start + (bank.rank if rank is None else rank))
    for weight, a, b in adapters_of(model):
        yield from peft_tensors(weight, gathered(a)[..., own, :], gathered(b)[..., own, :])


def load_adapter(model: DecoderLM, slot: int, tensors: Iterable[tuple[str, Tensor]], settings: LoraSettings) -> None:
    """Copy an adapter, under PEFT's names, into `slot` in place of its old content. The bank grows where needed.

    Raises HeadwayError, with the bank as it was, when a tensor does not fit or a half of a pair is missing.
    """
    pairs = adapter_pairs(model, tensors, settings.rank)
    bank = model.adapters
    adapted = {weight.name for weight, _, _ in adapters_of(model)}
    if bank is None or slot >= len(bank.scales) or settings.rank > bank.rank or not pairs.keys() <= adapted:
        rank, slots = (0, 0) if bank is None else (bank.rank, len(bank.scales))
        default = None if bank is None else bank.default
        targets = {weight.target for weight in adaptable_weights(model) if weight.name in pairs}
        resize_bank(model, targets, rank=max(rank, settings.rank), slots=max(slots, slot + 1), default=default)
        bank = bank_of(model)
    drop_adapter(model, slot)
    with torch.no_grad():
        for weight, a, b in adapters_of(model):
            if weight.name in pairs:
                own = slice(slot * bank.rank, slot * bank.rank + settings.rank)
                a[..., own, :], b[..., own, :] = pairs[weight.name]
    bank.set_scale(slot, settings.alpha / settings.rank)


def drop_adapter(model: DecoderLM, slot: int) -> None:
    """Clear `slot`: its tokens use the base model."""
    bank = bank_of(model)
    with torch.no_grad():
        for _, a, b in adapters_of(model):
            for parameter in (a, b):
                parameter[..., slot * bank.rank : (slot + 1) * bank.rank, :].zero_()


def merge_adapter(model: DecoderLM, slot: int = 0) -> None:
    """Add the adapter in `slot` to the weights and remove the bank. The model must not be sharded."""
    bank = bank_of(model)
    own = slice(slot * bank.rank, (slot + 1) * bank.rank)
    with torch.no_grad():
        for weight, a, b in adapters_of(model):
            delta = bank.scales[slot] * (b[..., own, :].float().transpose(-2, -1) @ a[..., own, :].float())
            weight.weight.copy_(weight.weight.float() + delta)
    drop_bank(model)


def save_adapter(model: DecoderLM, folder: Path | str, settings: LoraSettings, base: str, *, slot: int = 0) -> None:
    """Write the adapter as PEFT does, whole or not at all. `base` names the model that it belongs to."""
    targets = {weight.target for weight, _, _ in adapters_of(model)}
    write_adapter(adapter_tensors(model, slot, settings.rank), folder, settings, base, targets)
