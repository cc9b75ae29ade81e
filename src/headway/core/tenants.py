"""Tenants of a host: runs that share its frozen model, its trainer and its engines."""

import hashlib
import re

import msgspec

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
"""A tenant's name: part of routes, folders and metrics."""


class TenantGrant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant as an engine of the host knows it: the body of `PUT /tenants` is the list of all.

    Whoever shows the token with this hash is served the adapter of this name as its policy, and no other.
    `weight` is the tenant's share of the engine beside those of the others.
    """

    name: str
    token_sha256: str
    weight: float = 1.0


def token_hash(token: str) -> str:
    """Return the hash by which engines know a tenant's token: they need not hold the secret itself."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


CHECKPOINT_FILES = (
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
    "optimizer.safetensors",
    "COMPLETE",
)
"""Files of a tenant's checkpoint. The marker comes last."""


class TenantJoin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant's request to join: `settings` as JSON, the token it chose, and the checkpoint that it continues from."""

    settings: str
    token: str
    checkpoint: dict[str, bytes] | None = None


class TenantJoined(msgspec.Struct, frozen=True):
    """The host's answer. `session` goes along with every later request: it ends when the host is started again, or
    when the tenant joins again. `dtype` is the precision in which the host computes."""

    session: str
    step: int
    dtype: str
    weight: float


class StepOutcome(msgspec.Struct, frozen=True):
    """One trained step of a tenant. `error` says why the host trains it no more, if it does not."""

    step: int
    metrics: dict[str, float]
    error: str | None = None


class TenantStatus(msgspec.Struct):
    """A tenant at a glance, with its costs since the host's trainer started: tokens, and seconds of the trainer."""

    name: str
    state: str
    """training, waiting (for a batch), silent, stopped or dropped."""
    step: int
    weight: float
    share: float
    """Its part of the trainer's time of all tenants so far."""
    rank: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0
    """Seconds that its batches waited for their first pass, in all."""
    refused: int = 0
    last_refusal: str = ""
    silent_seconds: float = 0.0
    sampled_tokens: int = 0
    """Tokens that the engines sampled for it, since each of them started."""
    cost: float = 0.0
    """Price of its seconds of the trainer, 0 where the host knows no prices."""


class HostStatus(msgspec.Struct):
    """A host at a glance."""

    model: str
    engines: dict[str, str]
    passes: int
    busy_seconds: float
    tenants: list[TenantStatus]
    refused: int = 0
    """Requests that were refused and of no tenant here."""
    currency: str = ""
    """Name of the money that costs are in; empty where the host knows no prices."""


class TenantUse(msgspec.Struct, frozen=True):
    """A tenant's use of one engine: an entry of `GET /tenants`.

    `version` is that of its adapter, None before the first. Tokens, seconds and refusals are counted from the tenant's
    first grant on; `queue_seconds` is the time that its requests waited for their turn, added up.
    """

    name: str
    weight: float
    version: int | None
    running: int
    waiting: int
    prompt_tokens: int
    tokens: int
    queue_seconds: float
    refused: int
