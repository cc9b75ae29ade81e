"""From a config to a model: its memory, and random weights that depend on a seed and a parameter's name alone, not on
torch's version or the order of layers."""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from headway.models.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.layers.block import Block, RunBlock
from headway.models.ops.linear import tune_matmul
from headway.models.registry import find_family


def build_model(
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = 0,
    compute_dtype: torch.dtype | None = None,
    recompute: Callable[[int], RunBlock | None] | None = None,
) -> DecoderLM:
    """Build a model with random weights from `seed`; None, or the meta device, leaves them unset.

    It computes in `compute_dtype`, or in the precision of its weights. `recompute` says for each layer how its
    activations are recomputed in training; None: they are kept.
    """
    with torch.device("meta"):
        model = DecoderLM(config, find_family(config.family).block)
    model.model.embed_tokens.compute_dtype = compute_dtype
    if recompute is not None:
        for layer, block in enumerate(model.layers):
            assert isinstance(block, Block)
            block.recompute = recompute(layer)
    _allocate(model, torch.device(device), dtype)
    if torch.device(device).type == "meta":
        return model
    if torch.device(device).type == "cpu":
        tune_matmul(config.width)
    if seed is not None:
        init_weights(model, config.initializer_range, seed)
    return model


def init_weights(model: nn.Module, spread: float, seed: int) -> None:
    """Set norms to 1, biases to 0, and the rest to normal numbers around 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                fill_normal(parameter, spread, f"{seed}/{name}")


def fill_normal(tensor: Tensor, spread: float, key: str) -> None:
    """Fill with normal numbers. On CUDA the device draws, which is fast; elsewhere numpy, whose stream is stable."""
    if tensor.is_cuda:
        tensor.normal_(0.0, spread, generator=torch.Generator(tensor.device).manual_seed(_seed(key)))
    else:
        values = np.random.Generator(np.random.PCG64(_seed(key))).standard_normal(tensor.shape, dtype=np.float32)
        tensor.copy_(torch.from_numpy(values * np.float32(spread)))


def fill_uniform(tensor: Tensor, bound: float, key: str) -> None:
    """Fill with uniform numbers between -bound and bound."""
    values = np.random.Generator(np.random.PCG64(_seed(key))).random(tensor.shape, dtype=np.float32)
    tensor.copy_(torch.from_numpy((2 * values - 1) * np.float32(bound)))


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")


def _allocate(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give the parameters memory. `nn.Module.to` and `to_empty` would import torch's compiler to do it, which takes a
    process seconds."""
    for module in model.modules():
        for name, unset in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(unset.shape, dtype=dtype, device=device)))
