"""The frozen model that tenants share."""

from pathlib import Path

import torch

from headway.base.devices import resolve_dtype
from headway.base.errors import UsageError
from headway.config.host import beyond_tenants
from headway.config.trainer import TrainSettings
from headway.models.build import build_model
from headway.models.checkpoints.folders import read_tensors
from headway.models.checkpoints.tensors import load_hf_tensors
from headway.models.decoder import DecoderLM
from headway.models.layers.apart import RunApart
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.trainer.memory.recompute import recompute_policy


def build_base(settings: TrainSettings, device: torch.device) -> tuple[DecoderLM, Path]:
    """Load the settings' model, frozen and in the precision of computation; and the folder that it came from.

    Raises UsageError for settings that a trainer of tenants cannot follow.
    """
    if beyond := beyond_tenants(settings):
        raise UsageError(f"a trainer of tenants does not have {', '.join(beyond)}; leave the default")
    folder = resolve_model(settings.model.path, settings.model.family)
    config = load_config(folder, settings.model.implementation)
    dtype: torch.dtype = getattr(torch, resolve_dtype(settings.model.dtype, device.type))
    recompute = recompute_policy(settings.trainer.activations, config.layers)
    model = build_model(
        config,
        device=device,
        dtype=dtype,
        seed=None,
        compute_dtype=dtype,
        recompute=lambda layer: RunApart(recompute(layer)),
    )
    load_hf_tensors(model, read_tensors(folder))
    model.requires_grad_(False)
    model.train()
    return model, folder
