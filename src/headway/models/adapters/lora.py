"""LoRA adapters: trained, served side by side, merged into the weights, and kept in PEFT's folders."""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headway.base.errors import HeadwayError, UsageError
from headway.base.files import atomic_directory
from headway.config.shared import LoraSettings
from headway.models.adapters.files import CONFIG, WEIGHTS
from headway.models.build import fill_uniform
from headway.models.decoder import DecoderLM
from headway.models.gates.bank import AdapterBank
from headway.models.layers.experts import Experts
from headway.models.layers.linear import Linear
from headway.models.registry import find_family
from headway.models.sharded import gathered

PREFIX = "base_model.model."
EXPERTS = "experts"
"""The target that means the stacked weights of all routed experts."""
EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""What PEFT calls these."""


def bank_of(model: DecoderLM) -> AdapterBank:
    if model.adapters is None:
        raise HeadwayError("the model has no adapters")
    return model.adapters


@dataclass(frozen=True, slots=True)
class AdaptableWeight:
    """A weight that can have an adapter: that of a linear layer, (out, in), or one of all experts, (E, out, in). `name`
    is the layer's, for experts with the weight's, and `hf_name` that in Hugging Face's model; `holders` are the
    attributes of `module` for A and B."""

    name: str
    module: nn.Module
    weight: nn.Parameter
    holders: tuple[str, str]
    hf_name: str

    @property
    def target(self) -> str:
        """The name by which settings choose it."""
        return EXPERTS if self.stacked else self.name.rpartition(".")[2]

    @property
    def stacked(self) -> bool:
        return self.weight.dim() == 3

    @property
    def pair(self) -> tuple[nn.Parameter, nn.Parameter] | None:
        """A (…, ranks, in) and B (…, ranks, out), if there is an adapter."""
        a, b = (getattr(self.module, holder) for holder in self.holders)
        return None if a is None or b is None else (a, b)

    def hold(self, a: nn.Parameter | None, b: nn.Parameter | None) -> None:
        for holder, half in zip(self.holders, (a, b), strict=True):
            setattr(self.module, holder, half)

    @property
    def peft_name(self) -> str:
        """PEFT's name without `lora_A.weight`. It wraps a module once for each of its parameters, from the first on:
        the wrapper of the last is outermost."""
        module, _, weight = self.hf_name.rpartition(".")
        if not self.stacked:
            return self.hf_name
        return f"{module}.base_layer" if weight == "gate_up_proj" else module


def adaptable_weights(model: DecoderLM) -> Iterator[AdaptableWeight]:
    """Iterate over those of the blocks; the head has none."""
    family = find_family(model.config.family)
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.adaptable and module is not getattr(model, "lm_head", None):
            yield AdaptableWeight(name, module, module.weight, ("lora_A", "lora_B"), family.module_name(name))
        elif isinstance(module, Experts):
            for weight in ("gate_up_proj", "down_proj"):
                holders = (f"lora_{weight}_A", f"lora_{weight}_B")
                theirs = family.module_name(f"{name}.{weight}")
                yield AdaptableWeight(f"{name}.{weight}", module, module.get_parameter(weight), holders, theirs)


def adapters_of(model: DecoderLM) -> Iterator[tuple[AdaptableWeight, nn.Parameter, nn.Parameter]]:
    """Iterate over the weights that have adapters, with A and B."""
    for weight in adaptable_weights(model):
        if (pair := weight.pair) is not None:
            yield weight, *pair


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


def peft_tensors(weight: AdaptableWeight, half_A: Tensor, half_B: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The adapter of one weight as PEFT has it, of experts with A by expert and rank, and B by rank and expert."""
    yield f"{PREFIX}{weight.peft_name}.lora_A.weight", half_A.reshape(-1, half_A.shape[-1])
    flipped = half_B.permute(*reversed(range(half_B.dim())))
    yield f"{PREFIX}{weight.peft_name}.lora_B.weight", flipped.flatten(1).contiguous()


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


def write_adapter(
    named: Iterable[tuple[str, Tensor]], folder: Path | str, settings: LoraSettings, base: str, targets: set[str]
) -> None:
    """Write an adapter, given under PEFT's names, and the names of the layers that it adapts."""
    tensors = {name: tensor.detach().cpu() for name, tensor in named}
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "peft_type": "LORA",
        "r": settings.rank,
        "target_modules": sorted(targets - {EXPERTS}),
        "target_parameters": list(EXPERT_PARAMETERS) if EXPERTS in targets else None,
        "task_type": "CAUSAL_LM",
    }
    with atomic_directory(Path(folder)) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        (aside / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
        # safetensors makes files that only their owner can read; these are no more secret than the config.
        (aside / WEIGHTS).chmod((aside / CONFIG).stat().st_mode)


def adapter_settings(
    tensors: dict[str, Tensor], transport: dict[str, Any], default: LoraSettings | None
) -> LoraSettings:
    """Find the rank of an adapter, and its alpha in an update's `transport` or else in `default`."""
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if ".lora_A" in name and ".experts." not in name}
    if not ranks and default is not None:
        ranks = {default.rank}
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
    targets = config["target_modules"] or []
    parameters = config.get("target_parameters") or []
    if parameters and sorted(parameters) != sorted(EXPERT_PARAMETERS):
        raise HeadwayError(f"{folder}: target_parameters {parameters} are not supported (only {[*EXPERT_PARAMETERS]})")
    settings = LoraSettings(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout", 0.0),
        targets=([targets] if isinstance(targets, str) else list(targets)) + ([EXPERTS] if parameters else []),
    )
    return settings, tensors


def adapter_pairs(
    model: DecoderLM, tensors: Iterable[tuple[str, Tensor]], rank: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Collect A (…, rank, in) and B (…, rank, out) by layer, checked against the model."""
    weights = {weight.peft_name: weight for weight in adaptable_weights(model)}
    halves: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors:
        name, found, half = full_name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        weight = weights.get(name)
        if not found or weight is None or half not in ("A", "B"):
            raise HeadwayError(f"the adapter has a tensor that the model has no place for: {full_name}")
        *experts, outputs, inputs = weight.weight.shape
        ranks = rank * math.prod(experts)
        expected = (ranks, inputs) if half == "A" else (outputs, ranks)
        if tensor.shape != expected:
            raise HeadwayError(f"{full_name} is {tuple(tensor.shape)}, expected {expected}")
        whole = tensor.view(*experts, rank, inputs) if half == "A" else _flipped(tensor, rank, experts)
        halves.setdefault(weight.name, {})[half] = whole
    if incomplete := [name for name, pair in halves.items() if len(pair) == 1]:
        raise HeadwayError(f"the adapter has only one of lora_A and lora_B for: {', '.join(incomplete)}")
    return {name: (pair["A"], pair["B"]) for name, pair in halves.items()}


def _flipped(tensor_OR: Tensor, rank: int, experts: list[int]) -> Tensor:
    """PEFT's B, (out, rank x experts), as (experts, rank, out)."""
    whole = tensor_OR.reshape(-1, rank, *experts)
    return whole.permute(*reversed(range(whole.dim())))
