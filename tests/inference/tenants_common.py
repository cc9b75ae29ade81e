"""Tenants of a live server: their grants, their clients, and adapters that differ visibly."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from engine_serving import EmbeddedServer

from headway.config.shared import FilesystemWeights, LoraSettings
from headway.core.protocol import GenerateRequest, SamplingParams, WeightUpdate
from headway.core.runs import RunPaths
from headway.core.tenants import TenantGrant, token_hash
from headway.models.adapters.lora import adapter_tensors, apply_lora
from headway.models.build import build_model
from headway.transport.inference import InferenceClient
from headway.transport.weights import make_sender

LORA = LoraSettings(rank=4, alpha=8.0)


def grant(name: str, weight: float = 1.0) -> TenantGrant:
    return TenantGrant(name, token_hash(f"token of {name}"), weight)


def client(server: EmbeddedServer, name: str | None = None) -> InferenceClient:
    """A tenant's client; the host's without a name."""
    return InferenceClient(server.url, token=server.token if name is None else f"token of {name}")


def adapter(server: EmbeddedServer, folder: Path, seed: int, version: int, name: str = "policy") -> WeightUpdate:
    """An adapter as a run's trainer publishes it."""
    model = build_model(replace(server.service._engine.model.config))
    apply_lora(model, LORA, seed=seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("lora_B"):
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(seed))
    sender = make_sender(FilesystemWeights(keep_last=100), RunPaths(folder / f"run{seed}"))
    update = sender.publish(version, adapter_tensors(model), adapter=name)
    return msgspec.structs.replace(update, transport=update.transport | {"alpha": LORA.alpha})


def ask(tokens: Sequence[int], max_tokens: int = 12, model: str = "policy", **fields: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(list(tokens), model, sampling, **fields)
