"""A tenant's checkpoint: a folder with its adapter in PEFT's format, the optimizer's state, and a marker."""

from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headway.base.errors import DamagedError, HeadwayError
from headway.base.files import atomic_directory
from headway.core.runs import CHECKPOINT_MARKER
from headway.models.adapters.peft import read_adapter
from headway.models.decoder import DecoderLM
from headway.trainer.checkpoints.marker import Marker, check_origin, origin_of
from headway.trainer.tenants.tenant import Tenant

ADAPTER = "adapter"
OPTIMIZER = "optimizer.safetensors"


def save_tenant(tenant: Tenant, model: DecoderLM, folder: Path, base: str) -> None:
    """Write the tenant's last step, whole or not at all. Batches that wait are not part of it."""
    with atomic_directory(folder) as aside:
        tenant.adapter.save(aside / ADAPTER, base)
        state = {name: tensor.detach().cpu() for name, tensor in tenant.optimizer.state_tensors().items()}
        save_file(state, aside / OPTIMIZER)
        origin = origin_of(model.config, tenant.settings)
        marker = Marker(tenant.step, tenant.optimizer.updates, tenant.bad_steps, tenant.settings.seed, origin)
        (aside / CHECKPOINT_MARKER).write_bytes(msgspec.json.encode(marker))


def load_tenant(tenant: Tenant, model: DecoderLM, folder: Path) -> None:
    """Continue from a checkpoint. Raises UsageError where it is of another model, adapter or optimizer, and
    DamagedError where it cannot be read."""
    try:
        marker = msgspec.json.decode((folder / CHECKPOINT_MARKER).read_bytes(), type=Marker)
        check_origin(folder, marker.origin, origin_of(model.config, tenant.settings))
        _, tensors = read_adapter(folder / ADAPTER)
        state = load_file(folder / OPTIMIZER)
    except (OSError, msgspec.DecodeError, SafetensorError) as error:
        raise DamagedError(f"{folder} is damaged ({error}); continue from another checkpoint") from error
    live = tenant.optimizer.state_tensors()
    if state.keys() != live.keys() or any(state[name].shape != live[name].shape for name in live):
        raise HeadwayError(f"{folder}: the optimizer's state is of other tensors than those of this adapter")
    tenant.adapter.load(model, tensors.items())
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(state[name])
    tenant.step, tenant.optimizer.updates, tenant.bad_steps = marker.step, marker.updates, marker.bad_steps
