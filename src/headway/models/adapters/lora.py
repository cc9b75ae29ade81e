"""LoRA adapters: trained, served side by side, merged into the weights, and kept in PEFT's folders."""

import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headway.config.shared import LoraSettings
from headway.core.errors import HeadwayError, UsageError
from headway.core.files import atomic_directory
from headway.models.adapters.bank import AdapterBank
from headway.models.build import fill_uniform
from headway.models.decoder import DecoderLM
from headway.models.layers.linear import Linear
from headway.models.sharded import gathered

PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


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


def apply_lora(model: DecoderLM, settings: LoraSettings, *, slots: int = 1, seed: int = 0) -> None:
    """Freeze the model and give it adapters to train, which change nothing yet. Tokens without an index use slot 0.

    Call it before the model is sharded. On the meta device the adapters stay unset: call `init_adapters` later.
    """
    model.requires_grad_(False)
    resize_bank(model, settings.targets, rank=settings.rank, slots=slots, default=0)
    for slot in range(slots):
        bank_of(model).set_scale(slot, settings.alpha / settings.rank)
    for _, linear, a, b in adapted_linears(model):
        linear.adapter_dropout = settings.dropout
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
    for name, _, a, b in adapted_linears(model):
        yield f"{PREFIX}{name}.lora_A.weight", gathered(a)[own]
        yield f"{PREFIX}{name}.lora_B.weight", gathered(b)[own].T.contiguous()


def load_adapter(model: DecoderLM, slot: int, tensors: Iterable[tuple[str, Tensor]], settings: LoraSettings) -> None:
    """Copy an adapter, under PEFT's names, into `slot` in place of its old content. The bank grows where needed.

    Raises HeadwayError, with the bank as it was, when a tensor does not fit or a half of a pair is missing.
    """
    pairs = _pairs(model, tensors, settings.rank)
    bank = model.adapters
    adapted = {name for name, *_ in adapted_linears(model)}
    if bank is None or slot >= len(bank.scales) or settings.rank > bank.rank or not pairs.keys() <= adapted:
        rank, slots = (0, 0) if bank is None else (bank.rank, len(bank.scales))
        default = None if bank is None else bank.default
        targets = {name.rpartition(".")[2] for name in pairs}
        resize_bank(model, targets, rank=max(rank, settings.rank), slots=max(slots, slot + 1), default=default)
        bank = bank_of(model)
    drop_adapter(model, slot)
    with torch.no_grad():
        for name, _, a, b in adapted_linears(model):
            if name in pairs:
                own = slice(slot * bank.rank, slot * bank.rank + settings.rank)
                a[own], b[own] = pairs[name]
    bank.set_scale(slot, settings.alpha / settings.rank)


def drop_adapter(model: DecoderLM, slot: int) -> None:
    """Clear `slot`: its tokens use the base model."""
    bank = bank_of(model)
    with torch.no_grad():
        for _, _, a, b in adapted_linears(model):
            for parameter in (a, b):
                parameter[slot * bank.rank : (slot + 1) * bank.rank].zero_()


def merge_adapter(model: DecoderLM, slot: int = 0) -> None:
    """Add the adapter in `slot` to the weights and remove the bank. The model must not be sharded."""
    bank = bank_of(model)
    own = slice(slot * bank.rank, (slot + 1) * bank.rank)
    with torch.no_grad():
        for _, linear, a, b in adapted_linears(model):
            delta = bank.scales[slot] * (b[own].float().T @ a[own].float())
            linear.weight.copy_(linear.weight.float() + delta)
    drop_bank(model)


def save_adapter(model: DecoderLM, folder: Path | str, settings: LoraSettings, base: str, *, slot: int = 0) -> None:
    """Write the adapter as PEFT does, whole or not at all. `base` names the model that it belongs to."""
    tensors = {name: tensor.cpu() for name, tensor in adapter_tensors(model, slot, settings.rank)}
    targets = {name.removesuffix(".weight").rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "peft_type": "LORA",
        "r": settings.rank,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
    }
    with atomic_directory(Path(folder)) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        (aside / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))


def adapter_settings(
    tensors: dict[str, Tensor], transport: dict[str, Any], default: LoraSettings | None
) -> LoraSettings:
    """Find the rank of an adapter, and its alpha in an update's `transport` or else in `default`."""
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if ".lora_A" in name}
    if len(ranks) != 1:
        raise HeadwayError("its lora_A tensors do not have one rank in common")
    alpha = transport.get("alpha", default.alpha if default else None)
    if not isinstance(alpha, int | float):
        raise HeadwayError("its alpha is unknown; start the server with --model.lora.alpha or send transport.alpha")
    return LoraSettings(rank=ranks.pop(), alpha=alpha)


def read_adapter(folder: Path | str) -> tuple[LoraSettings, dict[str, Tensor]]:
    """Read a PEFT adapter folder into what `load_adapter` takes. Refuses variants that compute something else."""
    folder = Path(folder)
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise HeadwayError(f"{folder} is no adapter folder: it has no {Path(error.filename).name}") from None
    for key, plain in {"peft_type": "LORA", "bias": "none"}.items():
        if config.get(key, plain) != plain:
            raise HeadwayError(f"{folder}: {key} {config[key]!r} is not supported (only {plain!r})")
    for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out"):
        if config.get(key):
            raise HeadwayError(f"{folder}: an adapter with {key} is not supported")
    targets = config["target_modules"]
    settings = LoraSettings(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout", 0.0),
        targets=[targets] if isinstance(targets, str) else list(targets),
    )
    return settings, tensors


def _pairs(model: DecoderLM, tensors: Iterable[tuple[str, Tensor]], rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Collect A (rank, in) and B (rank, out) by layer, checked against the model."""
    linears = {f"model.{n}": m for n, m in model.model.named_modules() if isinstance(m, Linear)}
    halves: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors:
        name, found, half = full_name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        linear = linears.get(name)
        if not found or linear is None or half not in ("A", "B"):
            raise HeadwayError(f"the adapter has a tensor that the model has no place for: {full_name}")
        outputs, inputs = linear.weight.shape
        expected = (rank, inputs) if half == "A" else (outputs, rank)
        if tensor.shape != expected:
            raise HeadwayError(f"{full_name} is {tuple(tensor.shape)}, expected {expected}")
        halves.setdefault(name, {})[half] = tensor if half == "A" else tensor.T
    if incomplete := [name for name, pair in halves.items() if len(pair) == 1]:
        raise HeadwayError(f"the adapter has only one of lora_A and lora_B for: {', '.join(incomplete)}")
    return {name: (pair["A"], pair["B"]) for name, pair in halves.items()}
