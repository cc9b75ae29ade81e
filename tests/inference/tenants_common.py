"""Tenants of a live server: their grants, their clients, and adapters that differ visibly."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import torch
from aiohttp import web
from engine_serving import TOKEN, EmbeddedServer
from safetensors.torch import save

from headway.config.shared import FilesystemWeights, LoraSettings
from headway.core.protocol import GenerateRequest, SamplingParams, WeightUpdate
from headway.core.runs import RunPaths
from headway.core.tenants import TenantGrant, token_hash
from headway.inference.tenants.view import HostAddress
from headway.models.adapters.lora import adapter_tensors, apply_lora
from headway.models.build import build_model
from headway.transport.http_thread import HttpThread
from headway.transport.inference import InferenceClient
from headway.transport.weights import make_sender
from headway.transport.weights.host import HostSender

LORA = LoraSettings(rank=4, alpha=8.0)


AT_HOST: dict[int, bytes] = {}
"""Adapters by version, as the stand-in of a host serves them for any tenant."""


@cache
def host_address() -> HostAddress:
    """Start the stand-in of a host, which has adapters for those who show the engines' token."""

    async def get(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "wrong token"}, status=401)
        found = AT_HOST.get(int(request.match_info["version"]))
        if found is None:
            return web.json_response({"error": "there is no adapter of this step here"}, status=404)
        return web.Response(body=found)

    app = web.Application()
    app.add_routes([web.get("/v1/tenants/{name}/adapters/{version}", get)])
    return HostAddress(f"http://127.0.0.1:{HttpThread(app, '127.0.0.1', 0, 'adapters').port}", TOKEN)


def grant(name: str, weight: float = 1.0) -> TenantGrant:
    return TenantGrant(name, token_hash(f"token of {name}"), weight)


def client(server: EmbeddedServer, name: str | None = None) -> InferenceClient:
    """A tenant's client; the host's without a name."""
    server.context.host = host_address()
    return InferenceClient(server.url, token=server.token if name is None else f"token of {name}")


def adapter(server: EmbeddedServer, folder: Path, seed: int, version: int, name: str = "policy") -> WeightUpdate:
    """An adapter as a tenant announces it; with a name, as a run publishes it that has engines of its own."""
    model = build_model(replace(server.service._engine.model.config))
    apply_lora(model, LORA, seed=seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("lora_B"):
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(seed))
    paths, tensors = RunPaths(folder / f"run{seed}"), {key: t.detach() for key, t in adapter_tensors(model)}
    if name == "policy":
        AT_HOST[version] = save({key: tensor.contiguous() for key, tensor in tensors.items()})
        return HostSender(paths, "policy").publish(version, tensors.items(), adapter=name, alpha=LORA.alpha)
    update = make_sender(FilesystemWeights(keep_last=100), paths).publish(version, tensors.items(), adapter=name)
    return msgspec.structs.replace(update, transport=update.transport | {"alpha": LORA.alpha})


def ask(tokens: Sequence[int], max_tokens: int = 12, model: str = "policy", **fields: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(list(tokens), model, sampling, **fields)
