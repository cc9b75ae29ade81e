"""A run's place at a host: where it is, under which name, and the token with which it joins again."""

import re
from pathlib import Path

import msgspec

from headway.base.errors import HeadwayError, UsageError
from headway.base.files import write_atomic
from headway.core.runs import RunPaths
from headway.core.tenants import NAME
from headway.transport.control.tokens import find_token, read_token

TENANCY_FILE = "host.json"
ADDRESS_FILE = "host_address"
"""File in a host's `control/` with the address that tenants join."""
JOIN_TOKEN_FILE = "join_token"
ENGINES_FILE = "host_engines.json"
"""File in a host's `control/` with the addresses of its engines, which stay when it is started again."""


class Tenancy(msgspec.Struct, frozen=True):
    url: str
    name: str
    join_token: str

    def write(self, paths: RunPaths) -> None:
        """Keep it in the run's control folder, for its owner only."""
        file = paths.control / TENANCY_FILE
        paths.control.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(file, msgspec.json.encode(self))
        file.chmod(0o600)


def read_tenancy(paths: RunPaths) -> Tenancy | None:
    """Return a run's place at a host; None where it trains by itself."""
    try:
        return msgspec.json.decode((paths.control / TENANCY_FILE).read_bytes(), type=Tenancy)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise HeadwayError(f"{paths.control / TENANCY_FILE} is damaged ({error}); give --host URL again") from None


def find_host(host: str) -> tuple[str, str]:
    """Return the address of a host and the token with which to join it: by its URL, or by its folder on this machine.

    Raises UsageError where there is no token, or no host.
    """
    if not host.startswith(("http://", "https://")):
        folder = RunPaths(Path(host)).control
        try:
            return (folder / ADDRESS_FILE).read_text().strip(), read_token(folder / JOIN_TOKEN_FILE)
        except FileNotFoundError:
            raise UsageError(f"{host} is neither a host's address, http://HOST:PORT, nor the folder of one") from None
    token = find_token()
    if token is None:
        raise UsageError(
            f"{host} demands the token with which tenants join, which is in HOST/control/join_token there: put it into "
            "a file that only you can read and name it in HEADWAY_TOKEN_FILE, or set HEADWAY_TOKEN"
        )
    return host.rstrip("/"), token


def tenant_name(run: str) -> str:
    """Make a tenant's name of a run's."""
    name = re.sub(r"[^a-z0-9_-]", "-", run.lower()).lstrip("-_")[:40]
    if not NAME.fullmatch(name):
        raise UsageError(f"{run!r} makes no tenant's name; give one with --tenant: a-z, 0-9, '_' and '-', at most 40")
    return name
