"""The audit of a run while it goes on: now and then, in a thread, with a warning for each new finding."""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from headway.core.runs import RunPaths
from headway.monitor.audit.report import Audit, audit_run, printable

logger = logging.getLogger(__name__)

FIRST_STEPS = 8
"""Steps before the first audit: fewer say nothing about a trend."""
PAUSE_SECONDS = 30.0
MOST_SHARE = 0.02
"""Share of the time that audits may take."""


class LiveAudit:
    """Audits a run as its metrics come in. `warn` is called by `update` and `close`, never by the thread."""

    def __init__(self, paths: RunPaths, warn: Callable[[str], None]) -> None:
        self._paths, self._warn = paths, warn
        self._steps = 0
        self._known: set[tuple[str, str]] = set()
        self._next = 0.0
        self._thread: threading.Thread | None = None
        self._done: Audit | None = None

    def update(self, process: str, line: Mapping[str, float]) -> None:
        """Take note of a line of metrics; report what was found meanwhile, and look again when it is time."""
        self._steps += process == "trainer"
        self._report()
        busy = self._thread is not None and self._thread.is_alive()
        if not busy and self._steps >= FIRST_STEPS and time.monotonic() >= self._next:
            self._thread = threading.Thread(target=self._audit, name="audit", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Look a last time, at the whole run."""
        if self._thread is not None:
            self._thread.join()
        if self._steps:
            self._audit()
        self._report()

    def _audit(self) -> None:
        began = time.monotonic()
        try:
            self._done = audit_run(self._paths)
        except Exception:  # a run must not end because of its audit
            logger.exception("the audit failed")
        took = time.monotonic() - began
        self._next = time.monotonic() + max(PAUSE_SECONDS, took / MOST_SHARE)

    def _report(self) -> None:
        audit, self._done = self._done, None
        for found in audit.findings if audit else ():
            if found.level != "notice" and found.name not in self._known:
                self._known.add(found.name)
                self._warn(f"audit: {found.level} in {found.env}: {printable(found.text)} `headway audit` shows more")
