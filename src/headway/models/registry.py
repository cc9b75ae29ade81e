"""The known families, and building a model from its config. A new family is a folder and a line here."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from headway.models.config import ModelConfig
from headway.models.cpu import tune_matmul
from headway.models.decoder import DecoderLM
from headway.models.families.llama.model import Llama
from headway.models.families.llama.weights import parts as llama_parts
from headway.models.families.qwen3.model import Qwen3
from headway.models.families.qwen3.weights import parts as qwen3_parts
from headway.models.families.qwen3_moe.model import Qwen3Moe
from headway.models.families.qwen3_moe.weights import parts as qwen3_moe_parts
from headway.models.init import init_weights
from headway.models.layout import Part


class Family(NamedTuple):
    """`parts` says which tensors of a checkpoint a parameter is made of."""

    model: Callable[[ModelConfig], DecoderLM]
    parts: Callable[[str, ModelConfig], list[Part]]


FAMILIES = {
    "llama": Family(Llama, llama_parts),
    "qwen3": Family(Qwen3, qwen3_parts),
    "qwen3_moe": Family(Qwen3Moe, qwen3_moe_parts),
}


def build_model(
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = 0,
) -> DecoderLM:
    """A model with random weights from `seed`; None, or the meta device, leaves them unset."""
    with torch.device("meta"):
        model = FAMILIES[config.family].model(config)
    _place(model, torch.device(device), dtype)
    if torch.device(device).type == "meta":
        return model
    if torch.device(device).type == "cpu":
        tune_matmul(config.width)
    if seed is not None:
        init_weights(model, config.initializer_range, seed)
    return model


def _place(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give the parameters memory. `nn.Module.to` and `to_empty` would import torch's compiler to do it, which takes a
    process seconds."""
    for module in model.modules():
        for name, unset in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(unset.shape, dtype=dtype, device=device)))
