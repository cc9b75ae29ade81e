"""The trainer process of a host: the loop that trains tenants, and the service around it."""

import logging
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from types import FrameType

import msgspec

from headway.base.processes import is_loopback
from headway.config.host import HostSettings
from headway.core.runs import RunPaths
from headway.core.tenants import HostStatus
from headway.monitor.metrics import MetricsWriter
from headway.trainer.tenants.loop import TenantLoop
from headway.transport.control.tokens import read_token
from headway.transport.http_thread import HttpThread
from headway.transport.tenants.grants import GrantSender
from headway.transport.tenants.service import HostService
from headway.transport.tenants.tenancy import ENGINES_FILE, JOIN_TOKEN_FILE
from headway.transport.tls import server_context

logger = logging.getLogger(__name__)

_RECORD_SECONDS = 5.0


def serve_tenants(settings: HostSettings, paths: RunPaths) -> None:
    """Train and serve tenants until SIGTERM or SIGINT; then all of them are on disk."""
    asked = list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    admin, join = (read_token(paths.control / name) for name in ("token", JOIN_TOKEN_FILE))
    engines = msgspec.json.decode((paths.control / ENGINES_FILE).read_bytes(), type=dict[str, str])
    loop = TenantLoop(settings, paths.root / "tenants", lambda: engines)
    own = settings.host
    if not is_loopback(own.address) and not settings.tls.certificate:
        logger.warning("host.address %s can be reached by others, and nothing is encrypted: see tls", own.address)
    with ExitStack() as stack:
        grants = stack.enter_context(closing(GrantSender(paths, admin, loop.grants)))
        loop.sampled = grants.sampled
        service = HostService(loop, admin, join, own.request_mb << 20, grants.send)
        tls = server_context(settings.tls, own.address)
        stack.enter_context(closing(HttpThread(service.app, own.address, own.port, "host", tls)))
        writer = stack.enter_context(closing(MetricsWriter(paths, "host")))
        logger.info("serving tenants of %s at port %d", settings.model.path, own.port)
        loop.run(lambda: bool(asked), every(_RECORD_SECONDS, lambda: record(writer, loop.status())))


def every(seconds: float, act: Callable[[], None]) -> Callable[[], None]:
    """Make a function that acts when it was not called to do so for some time."""
    last = time.monotonic()

    def tick() -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            act()
            last = time.monotonic()

    return tick


def record(writer: MetricsWriter, status: HostStatus) -> None:
    """Write a line with the numbers of the host and of every tenant; its step is the number of passes."""
    values = {
        "tenants": float(len(status.tenants)),
        "busy_seconds": status.busy_seconds,
        "refused": float(status.refused),
    }
    for tenant in status.tenants:
        for name in ("step", "share", "tokens", "sampled_tokens", "seconds", "queue_seconds", "cost", "refused"):
            values[f"tenant/{tenant.name}/{name}"] = float(getattr(tenant, name))
    writer.log(status.passes, values)
