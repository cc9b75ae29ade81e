"""Prefill and decode apart with vLLM: its NIXL connector moves KV from engine to engine, and what belongs together has
one name."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from typing import Any

import numpy as np

from headway.base.addresses import own_address
from headway.base.errors import UsageError
from headway.base.extras import install_command
from headway.base.processes import free_port
from headway.config.inference import ServeSettings
from headway.core.protocol import GenerateRequest
from headway.inference.handover.transfers import LEASE_SECONDS, KvTransfer, Offers

OFFER: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
"""The connector's parameters of a request whose KV is to be kept for another engine."""
_CONFIG = "kv_transfer_config"
_CACHED = "remote_prefill_cached_tokens"
_SOMEWHERE = "192.0.2.1"
"""An address that no host has: the way to it is the way out of this one."""


def check_transfers(settings: ServeSettings) -> None:
    """Raises UsageError where vLLM could not move KV from engine to engine."""
    own = settings.inference
    role = f"inference.role {own.role}"
    if find_spec("nixl") is None:
        raise UsageError(
            f"{role} with vLLM moves KV by NIXL, which is not installed: {install_command('nixl')}, "
            "or use --engine embedded"
        )
    if _CONFIG in own.vllm:
        raise UsageError(f"{role} sets inference.vllm.{_CONFIG} itself; leave one of the two out")
    for name in ("data_parallel_size", "pipeline_parallel_size"):
        if own.vllm.get(name, 1) != 1:
            raise UsageError(f"{role} with vLLM needs inference.vllm.{name} 1; start more servers instead")


def connector() -> dict[str, Any]:
    """Return vLLM's arguments of an engine that gives KV and takes it. What does not come is computed again."""
    return {
        _CONFIG: {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
        }
    }


def connector_environment(host: str, device: str) -> dict[str, str]:
    """Return the variables that tell the connector where others reach it. `host` is the server's address."""
    reached = own_address(_SOMEWHERE) if host in ("0.0.0.0", "::") else host
    wanted = {"VLLM_NIXL_SIDE_CHANNEL_HOST": reached, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(reached))}
    return wanted | ({"UCX_TLS": "tcp,sm,self"} if device == "cpu" else {})


def kv_name(token_ids: Sequence[int], *belongs_to: object) -> str:
    """Name the KV of tokens by all that it depends on."""
    name = blake2b(repr(belongs_to).encode(), digest_size=16)
    name.update(np.asarray(token_ids, dtype=np.int64).tobytes())
    return name.hexdigest()


class Offer:
    """Follows a request whose KV is left to another engine. `served` tells what serves the request now."""

    def __init__(self, request: GenerateRequest, served: Callable[[], object]) -> None:
        self._request, self._served = request, served
        self._begun = served()
        self._sampled: list[int] = []

    def take(self, output: Any, offers: Offers) -> KvTransfer | None:
        """Note an output of vLLM, and its KV among `offers` once it ends. Returns the way to that; None where weights
        changed meanwhile."""
        self._sampled += output.outputs[0].token_ids
        if output.kv_transfer_params is None:
            return None
        key = str(output.kv_transfer_params["remote_request_id"])
        offers.add(key)
        if self._served() != self._begun:
            return None
        # Whoever takes it counts all of it as cached, not what was cached here.
        params = {name: value for name, value in output.kv_transfer_params.items() if name != _CACHED}
        token_ids = [*self._request.token_ids, *self._sampled[:-1]]
        return KvTransfer(key, kv_name(token_ids, self._begun, self._request.cache_salt), params)
