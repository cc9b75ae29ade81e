"""Adapters as PEFT has them: names of tensors, and folders."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.base.files import atomic_directory
from headway.config.shared import LoraSettings
from headway.models.adapters.adaptable import EXPERTS, AdaptableWeight, adaptable_weights
from headway.models.adapters.files import CONFIG, WEIGHTS
from headway.models.decoder import DecoderLM

PREFIX = "base_model.model."
EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Names of the stacked weights of all experts."""


def peft_tensors(weight: AdaptableWeight, half_A: Tensor, half_B: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The adapter of one weight as PEFT has it, of experts with A by expert and rank, and B by rank and expert."""
    yield f"{PREFIX}{weight.peft_name}.lora_A.weight", half_A.reshape(-1, half_A.shape[-1])
    flipped = half_B.permute(*reversed(range(half_B.dim())))
    yield f"{PREFIX}{weight.peft_name}.lora_B.weight", flipped.flatten(1).contiguous()


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
