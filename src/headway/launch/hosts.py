"""A run over several hosts: the service that its owner offers, and transports that cross hosts."""

import socket
import time
from collections.abc import Collection, Mapping
from contextlib import suppress

from headway.base.errors import HeadwayError, UsageError
from headway.base.files import write_atomic
from headway.base.processes import is_loopback
from headway.config.control import ControlSettings
from headway.config.rl import RlSettings
from headway.config.shared import HttpWeights, TlsSettings, ZmqRollouts
from headway.core.control import Role
from headway.core.runs import RunPaths
from headway.launch.supervisor import STOP_GRACE
from headway.transport.control.folder import SERVICE_FILE
from headway.transport.control.service import ControlService
from headway.transport.control.tokens import find_token
from headway.transport.http_client import check_trusted
from headway.transport.tls import scheme, server_context

LEAVE_SECONDS = 15.0
"""Time that engines on other hosts get to leave when the run has ended."""
_LOOK_SECONDS = 0.1
ROLES = ("inference", "orchestrator", "trainer")


def with_network_transports(settings: RlSettings, chosen: Mapping[str, object], host: str | None) -> RlSettings:
    """Choose sockets instead of the run folder for rollouts and weights, where others join the run at `host`.

    `chosen` names the settings that a file or flag set: those stay, since hosts may share a disk.
    """
    if host is None:
        return settings
    changed: dict[str, object] = {}
    sockets = isinstance(settings.rollouts, ZmqRollouts) and settings.rollouts.address.endswith(":0")
    if sockets or "rollouts.type" not in chosen:  # any free port, of the address that this host has now
        changed["rollouts"] = ZmqRollouts(address=f"tcp://{_ip(host)}:0")
    if "weights.type" not in chosen:
        changed["weights"] = HttpWeights()
    return settings.model_copy(update=changed)


def parse_roles(text: str | None) -> Collection[str]:
    """Read `--only`: which processes of a run start here. Raises UsageError for others."""
    chosen = ROLES if text is None else tuple(text.split(","))
    for role in chosen:
        if role not in ROLES:
            raise UsageError(f"--only takes {', '.join(ROLES)}, with commas between (got {role!r})")
    return chosen


def role_of(process: str) -> str:
    """Return the role of a process of a run by its name: `inference-1` is inference."""
    return process.partition("-")[0]


class RunHost:
    """The control service of a run, while its owner runs it."""

    def __init__(self, settings: ControlSettings, tls: TlsSettings, paths: RunPaths) -> None:
        """Serve. Raises HeadwayError when it cannot listen there, and UsageError when nobody would trust it."""
        assert settings.host is not None
        token = find_token(paths)
        assert token is not None
        self._service = ControlService(paths, token)
        context = server_context(tls, settings.host)
        self._thread = self._service.serve(settings.host, settings.port, context)
        self._file = paths.control / SERVICE_FILE
        self.url = f"{scheme(context)}://{_name(settings.host)}:{self._thread.port}"
        if context is not None:
            check_trusted(self.url)  # else nobody would ever join
        write_atomic(self._file, f"{self.url}\n")

    def end(self, finished: bool) -> None:
        """Let members finish and leave, then stop serving.

        Trainers and orchestrators of a run that is stopped write their checkpoints first; those of a finished run have
        all the time they need, as long as they are alive.
        """
        self._service.stop = not finished
        self._wait_without("trainer", "orchestrator", seconds=None if finished else STOP_GRACE)
        self._service.ended = True
        self._wait_without("trainer", "orchestrator", "engine", seconds=LEAVE_SECONDS)
        self._thread.close()
        self._file.unlink(missing_ok=True)

    def _wait_without(self, *roles: Role, seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._service.present(*roles) and (deadline is None or time.monotonic() < deadline):
            time.sleep(_LOOK_SECONDS)


def _ip(host: str) -> str:
    """Return the address of a host's name: sockets of ZeroMQ listen at numbers only. Raises UsageError."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise UsageError(f"control.host {host} is not an address of this host: {error.strerror}") from None


def _name(host: str) -> str:
    """Return what others call this host: the address itself, unless it stands for all of them."""
    if host not in ("0.0.0.0", "::"):
        return f"[{host}]" if ":" in host else host
    with suppress(OSError):
        if not is_loopback(address := socket.gethostbyname(socket.gethostname())):
            return address
    raise HeadwayError(f"control.host {host} stands for all addresses; name the one that other hosts reach")
