"""Grants: the engines of a host are told who its tenants are, whenever either of them changes."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from headway.base.errors import HeadwayError
from headway.core.runs import RunPaths
from headway.core.tenants import TenantGrant, TenantUse
from headway.transport.control.folder import FolderControl
from headway.transport.http_client import AnswerError, HttpClient

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
_AGAIN_SECONDS = 10.0
_TIMEOUT = 5.0


class GrantSender:
    """Sends the list of tenants to every engine: at once when it changes or an engine appears, else now and then."""

    def __init__(self, paths: RunPaths, token: str, grants: Callable[[], Sequence[TenantGrant]]) -> None:
        self._paths, self._token, self._grants = paths, token, grants
        self._control = FolderControl(paths)
        self._sent: dict[str, tuple[object, float]] = {}
        """By engine: the list and the engine's start that were last told, and when."""
        self._uses: dict[str, list[TenantUse]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="grants", daemon=True)
        self._thread.start()

    def send(self) -> None:
        """Tell every engine that does not know the list of now. One that cannot be reached is told later."""
        body = msgspec.json.encode(list(self._grants()))
        with self._lock:
            for name, url in self._control.engines().items():
                told = (body, url, self._started(name))
                before, when = self._sent.get(name, (None, 0.0))
                if told == before and time.monotonic() - when < _AGAIN_SECONDS:
                    continue
                if self._put(name, url, body):
                    self._sent[name] = told, time.monotonic()

    def sampled(self) -> dict[str, int]:
        """Count the tokens that all engines have sampled for each tenant, as they said when they were told last."""
        counts = Counter[str]()
        for uses in list(self._uses.values()):
            counts.update({use.name: use.tokens for use in uses})
        return counts

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            self.send()

    def _started(self, name: str) -> int:
        """Return what changes when an engine is started again: the time of its entry in the host's list."""
        try:
            return (self._paths.control / "engines" / f"{name}.json").stat().st_mtime_ns
        except OSError:
            return 0

    def _put(self, name: str, url: str, body: bytes) -> bool:
        client = HttpClient(url, self._token, timeout=_TIMEOUT)
        try:
            self._uses[name] = msgspec.json.decode(client.request("PUT", "/tenants", body), type=list[TenantUse])
        except AnswerError as error:
            logger.warning("engine %s does not take the list of tenants (%d: %s)", name, error.status, error)
        except (HeadwayError, msgspec.DecodeError) as error:
            logger.debug("engine %s is not told of the tenants yet: %s", name, error)
            return False
        finally:
            client.close()
        return True
