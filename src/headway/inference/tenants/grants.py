"""Grants: the tenants that an engine serves, found by their tokens."""

import hashlib
import re
from collections.abc import Sequence

from headway.core.openai.requests import RequestError
from headway.core.tenants import NAME, TenantGrant, token_hash
from headway.inference.engine import POLICY

MOST_TENANTS = 256
HEAVIEST = 1e6
"""Weights are between this and its inverse: shares are their ratios."""
_HASH = re.compile(r"[0-9a-f]{64}")


class Grants:
    """The tenants by name. `closed`: others than tenants and admins are refused even while there is no tenant.

    `awaited`: this is so, and nobody has said yet who the tenants are.
    """

    def __init__(self, *, closed: bool = False) -> None:
        self._closed = self.awaited = closed
        self._by_name: dict[str, TenantGrant] = {}
        self._by_hash: dict[str, TenantGrant] = {}

    @property
    def active(self) -> bool:
        """True where every caller needs a token."""
        return self._closed or bool(self._by_name)

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def weight(self, name: str) -> float:
        """Return a tenant's weight; 1 for one that has left and whose last requests end."""
        return self._by_name[name].weight if name in self._by_name else 1.0

    def share(self, name: str) -> float:
        """Return the part of the engine that is the tenant's own while all want more."""
        total = sum(grant.weight for grant in self._by_name.values())
        return self._by_name[name].weight / total if name in self._by_name else 0.0

    def holder(self, token: str) -> str | None:
        """Name the tenant of a token; None where it is nobody's. Looked up by its hash, so time tells nothing of it."""
        grant = self._by_hash.get(token_hash(token))
        return None if grant is None else grant.name

    def replace(self, grants: Sequence[TenantGrant]) -> set[str]:
        """Put `grants` in place of all others and name the tenants that are gone. Raises RequestError on a wrong list,
        with nothing changed."""
        check_grants(grants)
        self.awaited = False
        gone = self._by_name.keys() - {grant.name for grant in grants}
        self._by_name = {grant.name: grant for grant in grants}
        self._by_hash = {grant.token_sha256: grant for grant in grants}
        return set(gone)


def check_grants(grants: Sequence[TenantGrant]) -> None:
    if len(grants) > MOST_TENANTS:
        raise RequestError(f"an engine has at most {MOST_TENANTS} tenants, not {len(grants)}")
    for number, grant in enumerate(grants):
        where = f"[{number}]"
        if not NAME.fullmatch(grant.name) or grant.name == POLICY:
            raise RequestError(
                f"{grant.name[:80]!r} cannot be a tenant's name: up to 40 of a-z, 0-9, - and _, not {POLICY!r}",
                f"{where}.name",
            )
        if not _HASH.fullmatch(grant.token_sha256):
            raise RequestError(f"token_sha256 of {grant.name} must be 64 hexadecimal digits", f"{where}.token_sha256")
        if not 1 / HEAVIEST <= grant.weight <= HEAVIEST:
            raise RequestError(
                f"weight of {grant.name} must be {1 / HEAVIEST:g} to {HEAVIEST:g}, not {grant.weight:g}",
                f"{where}.weight",
            )
    for field in ("name", "token_sha256"):
        if len({getattr(grant, field) for grant in grants}) < len(grants):
            raise RequestError(f"two tenants have the same {field}", field)


def tenant_secret(token: str, name: str) -> str:
    """Derive a secret of one tenant from the engines' token: it keys what engines keep for that tenant alone, and is
    equal in all engines of a fleet."""
    return hashlib.blake2b(
        name.encode(), key=hashlib.sha256(token.encode()).digest(), person=b"headway.tenant"
    ).hexdigest()
