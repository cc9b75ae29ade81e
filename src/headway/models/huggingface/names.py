"""Names and places of a checkpoint's tensors in Hugging Face's modules, which stack experts and rename parameters."""

from typing import Any

import torch
from torch import Tensor

from headway.base.errors import UsageError
from headway.models.checkpoint_tensors import CheckpointTensor
from headway.models.configs.transformers import TransformersConfig
from headway.models.huggingface.configs import hf_module


def checkpoint_names(config: TransformersConfig) -> dict[str, list[CheckpointTensor]]:
    """Map each parameter of the module to its tensors in checkpoints, as transformers writes them."""
    module = hf_module(config.hf)
    return {name: _tensors_of(module, name, parameter) for name, parameter in module.named_parameters()}


def _tensors_of(module: Any, name: str, parameter: Tensor) -> list[CheckpointTensor]:
    """Let transformers take a tensor apart that holds the number of every row: what comes out tells which rows."""
    from transformers.core_model_loading import revert_weight_conversion

    rows = parameter.shape[: max(1, parameter.dim() - 1)]
    width = [1] * (parameter.dim() - len(rows))
    numbers = torch.arange(rows.numel()).view(*rows, *width)
    return [_located(found, part, rows) for found, part in revert_weight_conversion(module, {name: numbers}).items()]


def _located(name: str, part: Tensor, rows: torch.Size) -> CheckpointTensor:
    first, count = int(part.flatten()[0]), part.numel()
    if not torch.equal(part.flatten(), torch.arange(first, first + count)):
        raise UsageError(f"checkpoints hold {name} in another order than transformers' module, which is not supported")
    if count == rows.numel():
        return CheckpointTensor(name)
    if len(rows) == 1:
        return CheckpointTensor(name, (slice(first, first + count),))
    expert, row = divmod(first, rows[1])
    return CheckpointTensor(name, (expert,) if count == rows[1] else (expert, slice(row, row + count)))
