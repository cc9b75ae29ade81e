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
