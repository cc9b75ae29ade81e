"""Adapters of tenants: an engine fetches them from its own host, which trained them, and from nowhere else.

The tenant's run announces a version to its orchestrator by number and fingerprint alone. It names no path and no
address: the engine puts in the address of its host (`inference/tenants/view.py`). So a tenant needs no disk in common
with the host, and cannot make an engine read anything.
"""

from collections.abc import Iterator
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from headway.base.errors import HeadwayError
from headway.core.protocol import WeightUpdate
from headway.transport.announcements import announce
from headway.transport.http_client import HttpClient
from headway.transport.weights.fingerprint import Fingerprint, digest_of
from headway.transport.weights.layout import Arrival, Layout, RankParts
from headway.transport.weights.mapped_memory import MappedMemory
from headway.transport.weights.publish import WeightSender
from headway.transport.weights.shards import Shard

_KEPT = 2
_TIMEOUT = 60.0


class HostSender(WeightSender):
    """The tenant's side: announces versions that the host holds."""

    def close(self) -> None:
        """The host keeps the newest version."""

    def _store(self, version: int, shards: Iterator[Shard]) -> tuple[Layout, dict[str, Any]]:
        fingerprint = Fingerprint()
        for shard in shards:
            fingerprint.add(shard.name, shard.tensor.to(shard.dtype), shard.offset, shard.shape)
        return self._gather(RankParts(fingerprint.shards(), {}, [])), {"type": "host"}

    def _announce(self, update: WeightUpdate, layout: Layout) -> None:
        announce(self._paths, update, keep_last=_KEPT, durable=False)


def fetch(update: WeightUpdate, _memory: MappedMemory) -> tuple[Layout, Iterator[Arrival]]:
    """Fetch a tenant's adapter from the host. Raises HeadwayError where it does not have this version."""
    url, token, tenant = (str(update.transport[key]) for key in ("url", "token", "tenant"))
    http = HttpClient(url, token, timeout=_TIMEOUT)
    try:
        tensors = load(http.request("GET", f"/v1/tenants/{tenant}/adapters/{update.version}"))
    except SafetensorError as error:
        raise HeadwayError(f"the host sent an adapter that cannot be read: {error}") from error
    finally:
        http.close()
    fingerprint = Fingerprint()
    for name, tensor in tensors.items():
        fingerprint.add(name, tensor)
    sums = fingerprint.sums()
    arrivals = (Arrival(name, 0, tensor.view(-1)) for name, tensor in tensors.items() if tensor.numel())
    return Layout(digest_of(sums), sums, {}, []), arrivals
