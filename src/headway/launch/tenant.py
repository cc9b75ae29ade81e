"""A run as a tenant of a host: which engines it has, and joining before its processes start."""

import logging
import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from headway.base.errors import HeadwayError, UsageError
from headway.config.rl import RlSettings
from headway.config.shared import RunSettings
from headway.config.trainer import TrainSettings
from headway.core.runs import RunPaths
from headway.monitor.runs import open_run
from headway.transport.control.tokens import TOKEN, TOKEN_FILE, find_token, write_token
from headway.transport.http_client import AnswerError, UnreachableError
from headway.transport.tenants.client import HostClient, leave, patiently
from headway.transport.tenants.tenancy import Tenancy, find_host, read_tenancy, tenant_name

logger = logging.getLogger(__name__)

WAIT_SECONDS = 120.0
"""Time that a run waits for a host which does not answer yet."""


def find_tenancy(host: str | None, name: str | None, resume: Path | None, settings: RunSettings) -> Tenancy | None:
    """Return the place of a run at a host, by --host and --tenant or as the run that is resumed has it; None where it
    trains by itself. Raises UsageError where it has no name, or the host no token."""
    if host is None:
        if name is not None:
            raise UsageError("--tenant is a name at a host; give --host, too")
        return read_tenancy(open_run(resume)) if resume else None
    url, token = find_host(host)
    before = read_tenancy(open_run(resume)) if resume else None
    run = resume.resolve().name if resume else settings.name
    if name is None and before is None and run is None:
        raise UsageError("a tenant has a name: give the run one with --run.name, or the tenant with --tenant")
    return Tenancy(url, tenant_name(name or (before.name if before else run or "")), token)


def check_tenant(settings: TrainSettings) -> None:
    """Raise UsageError where a run could not be trained at any host."""
    from headway.trainer.tenants.requested import requested_settings

    requested_settings(settings)


def at_host(settings: RlSettings, tenancy: Tenancy) -> RlSettings:
    """Give a run the host's engines. Raises UsageError where it could not be trained there."""
    check_tenant(settings)
    engines = sorted(reach_host(tenancy).values())
    return settings.model_copy(update={"orchestrator": settings.orchestrator.model_copy(update={"engines": engines})})


def reach_host(tenancy: Tenancy) -> dict[str, str]:
    """Wait for a host that may have been started just now. Returns its engines. Raises UsageError where it refuses.

    From here on this process and its children have the run's own token, not that for joining.
    """
    for variable in (TOKEN, TOKEN_FILE):
        os.environ.pop(variable, None)
    with closing(HostClient(tenancy.url, tenancy.join_token)) as client:
        return _wait_for(client)


def _wait_for(client: HostClient) -> dict[str, str]:
    try:
        return patiently(client.engines, _after(WAIT_SECONDS))
    except UnreachableError as error:
        raise HeadwayError(f"{error}; is `headway host` up?") from None
    except AnswerError as error:
        raise UsageError(f"{client.http.url}: {error}") from None


def join_from(settings: TrainSettings, paths: RunPaths, tenancy: Tenancy) -> None:
    """Join before any process of the run starts: the host may refuse, and its engines have to know the run's token."""
    from headway.trainer.tenants.joining import join_host

    write_token(paths)
    tenancy.write(paths)
    join_host(settings, paths, tenancy, _after(WAIT_SECONDS))  # it answered a moment ago, and may have died since


def leave_host(paths: RunPaths, tenancy: Tenancy) -> None:
    """Leave with the run's end: what it needs to continue is in its own folder. A host that is away drops it later."""
    token = find_token(paths)
    try:
        leave(tenancy.url, tenancy.name, token or "")
    except HeadwayError as error:
        logger.warning("the host was not told that this run has ended: %s", error)


def _after(seconds: float) -> Callable[[], bool]:
    """Return what is true once this time has passed."""
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() > deadline
