"""Joining a host, with the run's newest checkpoint."""

import logging
import time
from collections.abc import Callable
from contextlib import closing

from headway.base.errors import HeadwayError
from headway.config.trainer import TrainSettings
from headway.core.runs import RunPaths
from headway.core.tenants import TenantJoin, TenantJoined
from headway.trainer.tenants.folder import read_files
from headway.trainer.tenants.requested import requested_settings
from headway.transport.control.folder import FolderControl
from headway.transport.tenants.client import HostClient, patiently
from headway.transport.tenants.tenancy import Tenancy

logger = logging.getLogger(__name__)


def join_host(
    settings: TrainSettings, paths: RunPaths, tenancy: Tenancy, stop: Callable[[], bool] = lambda: True
) -> TenantJoined:
    """Join the host with the run's newest checkpoint. Raises UsageError with its reason where it refuses."""
    token = FolderControl(paths).token
    assert token is not None
    steps = paths.complete_checkpoints()
    checkpoint = read_files(paths.checkpoint(steps[-1])) if steps else None
    request = TenantJoin(requested_settings(settings), token, checkpoint)
    with closing(HostClient(tenancy.url, tenancy.join_token)) as client:
        away = AwayLog(tenancy.url)
        return patiently(lambda: client.join(tenancy.name, request), stop, away.note)


class AwayLog:
    """Says now and then that the host does not answer."""

    def __init__(self, url: str) -> None:
        self._url, self._next = url, 0.0

    def note(self, error: HeadwayError) -> None:
        if time.monotonic() > self._next:
            logger.warning("the host at %s does not answer (%s); waiting for it", self._url, error)
            self._next = time.monotonic() + 60.0
