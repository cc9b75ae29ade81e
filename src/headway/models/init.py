"""Random weights that depend on a seed and a parameter's name alone: not on torch's version or the order of layers."""

import hashlib

import numpy as np
import torch
from torch import Tensor, nn


def init_weights(model: nn.Module, spread: float, seed: int) -> None:
    """Norms 1, biases 0, the rest normal around 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                fill_normal(parameter, spread, f"{seed}/{name}")


def fill_normal(tensor: Tensor, spread: float, key: str) -> None:
    """Normal numbers. On CUDA the device draws, which is fast; elsewhere numpy, whose stream is stable."""
    if tensor.is_cuda:
        tensor.normal_(0.0, spread, generator=torch.Generator(tensor.device).manual_seed(_seed(key)))
    else:
        values = np.random.Generator(np.random.PCG64(_seed(key))).standard_normal(tensor.shape, dtype=np.float32)
        tensor.copy_(torch.from_numpy(values * np.float32(spread)))


def fill_uniform(tensor: Tensor, bound: float, key: str) -> None:
    """Uniform numbers between -bound and bound."""
    values = np.random.Generator(np.random.PCG64(_seed(key))).random(tensor.shape, dtype=np.float32)
    tensor.copy_(torch.from_numpy((2 * values - 1) * np.float32(bound)))


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
