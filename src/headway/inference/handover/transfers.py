"""KV that engines move among themselves, outside of our server, as vLLM's connectors do: it is named, offered to one
taker, and claimed before it moves."""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from headway.core.protocol import GenerateRequest

CLAIM_SECONDS = 30.0
"""An offer may be claimed for so long."""
LEASE_SECONDS = 60
"""An engine holds the KV of a prompt for so long if nobody takes it. A claim at the last moment leaves enough of it."""


class KvTransfer(msgspec.Struct, frozen=True):
    """The way to KV that an engine holds under `key`. `state` is a digest of the weights and tokens that it belongs to,
    `params` are the connector's own."""

    key: str
    state: str
    params: dict[str, Any]


class TransferRequest(GenerateRequest):
    """A request whose KV is left to another engine, or comes from one. Made by the server, never read from a client.

    `takes` is the state that the KV must have, where it comes from elsewhere.
    """

    transfer: dict[str, Any] = {}
    takes: str | None = None


def as_transfer(request: GenerateRequest, transfer: dict[str, Any], takes: str | None = None) -> TransferRequest:
    fields = {name: getattr(request, name) for name in GenerateRequest.__struct_fields__}
    return TransferRequest(**fields, transfer=transfer, takes=takes)


class Offers:
    """KV that an engine holds for others, by the keys of its transfers. Each can be claimed once, in time: afterwards
    the engine reuses the memory, and whoever read it would get the KV of other prompts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._open: dict[str, float] = {}
        self._revoked: dict[str, float] = {}
        self._clock = clock

    def add(self, key: str) -> None:
        self._open = self._young(self._open, CLAIM_SECONDS)
        self._open[key] = self._clock()

    def claim(self, key: str) -> bool:
        return self._open.pop(key, -CLAIM_SECONDS) > self._clock() - CLAIM_SECONDS

    def revoke(self) -> list[str]:
        """Take back what nobody has claimed. Returns the keys of all that was taken back and may still be held."""
        self._revoked = self._young(self._revoked | self._open, LEASE_SECONDS)
        self._open = {}
        return list(self._revoked)

    def _young(self, keys: dict[str, float], seconds: float) -> dict[str, float]:
        oldest = self._clock() - seconds
        return {key: since for key, since in keys.items() if since > oldest}
