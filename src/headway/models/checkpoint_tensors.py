"""Tensors of checkpoints that a parameter is made of: names, and where they stand in it."""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.models.configs.config import ModelConfig


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """The tensor called `name` in the checkpoint is `parameter[at]` here, with the last two axes swapped where it is
    `transposed`."""

    name: str
    at: tuple[int | slice, ...] = ()
    transposed: bool = False


def renamed(parameter: str, names: Mapping[str, str]) -> str:
    """Replace the parts of a parameter's name that checkpoints call otherwise."""
    for ours, theirs in names.items():
        parameter = parameter.replace(ours, theirs)
    return parameter


def behind_last_layer(name: str, config: ModelConfig) -> bool:
    """Tell whether a checkpoint's tensor is of the layers after the last, which predict tokens further ahead (MTP)."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    return name.startswith("model.layers.") and layer.isdecimal() and int(layer) >= config.layers


def split_experts(
    parameter: str,
    config: ModelConfig,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[CheckpointTensor]:
    """The tensors of stacked experts (gate above up): three matrices of each in the checkpoint, by their `names`.
    Empty for other parameters."""
    prefix, found, projection = parameter.partition(".mlp.experts.")
    if not found:
        return []
    gate, up, down = names
    width, experts = config.expert_width, [f"{prefix}.mlp.experts.{e}" for e in range(config.experts)]
    if projection == "down_proj":
        return [CheckpointTensor(f"{expert}.{down}.weight", (e,)) for e, expert in enumerate(experts)]
    gates, ups = slice(0, width), slice(width, 2 * width)
    return [
        tensor
        for e, expert in enumerate(experts)
        for tensor in (
            CheckpointTensor(f"{expert}.{gate}.weight", (e, gates)),
            CheckpointTensor(f"{expert}.{up}.weight", (e, ups)),
        )
    ]
