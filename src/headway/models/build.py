"""From a config to a model: its memory, and random weights that depend on a seed and a parameter's name alone, not on
torch's version or the order of layers."""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.layers.block import RunBlock
from headway.models.layers.norm import RMSNorm
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
        model = find_family(config.family).model(config)
    model.compute_in(compute_dtype)
    if recompute is not None:
        model.recompute_blocks(recompute)
    _allocate(model, torch.device(device), dtype)
    if torch.device(device).type == "meta":
        return model
    if torch.device(device).type == "cpu":
        tune_matmul(config.width)
    if seed is not None:
        init_weights(model, config.initializer_range, seed)
    return model


def init_weights(model: nn.Module, spread: float, seed: int) -> None:
    """Set norms to scale nothing, biases to 0, and the rest to normal numbers around 0."""
    neutral = {f"{name}.weight": m.neutral for name, m in model.named_modules() if isinstance(m, RMSNorm)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] in _RECURRENT:
                fill_recurrent(parameter, name.rpartition(".")[2])
            elif name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name or name in neutral:
                parameter.fill_(neutral.get(name, 1.0))
            else:
                fill_normal(parameter, spread, f"{seed}/{name}")


_RECURRENT = ("A_log", "dt_bias", "D")
"""Parameters of recurrent mixers with one number per head."""


def fill_recurrent(tensor: Tensor, name: str) -> None:
    """Spread over the heads how fast they forget, as Mamba-2 does: rates of 1 to 16, steps of 0.001 to 0.1."""
    share = torch.linspace(0, 1, len(tensor), dtype=torch.float64)
    if name == "A_log":
        values = (1 + 15 * share).log()
    elif name == "dt_bias":
        step = 0.001 * 100**share
        values = step + torch.log(-torch.expm1(-step))  # softplus of this is the step
    else:
        values = torch.ones_like(share)
    tensor.copy_(values)


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
    """Give the parameters memory, in float32 those that their module names so. `nn.Module.to` and `to_empty` would
    import torch's compiler to do it, which takes a process seconds."""
    for module in model.modules():
        precise = getattr(module, "float32_parameters", ())
        for name, unset in list(module.named_parameters(recurse=False)):
            own = torch.float32 if name in precise else dtype
            memory = torch.empty(unset.shape, dtype=own, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=unset.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            # Computed when the module was built; an unset model keeps it for later.
            setattr(module, name, buffer if device.type == "meta" else buffer.to(device))
