"""The runs below a folder, by name, and the data of them that is kept in memory."""

import re
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.core.runs import RunPaths
from headway.monitor.audit.report import Audit, audit_run
from headway.monitor.dashboard.index import RolloutIndex
from headway.monitor.dashboard.previews import Previews
from headway.monitor.dashboard.summary import summarize
from headway.monitor.dashboard.table import MetricTable

KEPT = 8
"""Runs whose tables and indexes stay in memory."""
PROCESS = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")


class RunData:
    """The data read of one run: a table per process, and the index of its rollouts."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.index = RolloutIndex(paths)
        self.previews = Previews(self.index)
        self._tables: dict[str, MetricTable] = {}
        self._audit: tuple[tuple[float, ...], Audit] | None = None
        self._auditing = threading.Lock()

    def tables(self) -> dict[str, MetricTable]:
        """Read the tables of all processes, as of now."""
        for path in sorted(self.paths.metrics.glob("*.jsonl")):
            if PROCESS.match(path.stem) and not path.is_symlink():
                self._tables.setdefault(path.stem, MetricTable(path))
        for table in self._tables.values():
            table.refresh()
        return dict(self._tables)

    def audit(self) -> Audit:
        """Audit the run, anew when it has grown; one at a time, since it reads many records."""
        with self._auditing:
            state = run_state(self.paths)
            if self._audit is None or self._audit[0] != state:
                self._audit = state, audit_run(self.paths)
            return self._audit[1]


class Catalog:
    """Finds runs in `folder`, or the one run that `folder` itself is.

    A run is only ever found by looking the name up among those that are there, so that no name from outside
    becomes part of a path. Folders that are links are not followed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._views: OrderedDict[str, RunData] = OrderedDict()
        self._summaries: dict[str, tuple[tuple[float, ...], float, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def found(self) -> dict[str, RunPaths]:
        """Find the runs that are there now, by name."""
        if (self.folder / "run.json").is_file():
            return {self.folder.resolve().name: RunPaths(self.folder)}
        try:
            folders = sorted(path for path in self.folder.iterdir() if not path.is_symlink())
        except OSError:
            return {}
        return {path.name: RunPaths(path) for path in folders if (path / "run.json").is_file()}

    def view(self, name: str) -> RunData:
        """Raises KeyError when there is no such run."""
        paths = self.found()[name]
        with self._lock:
            view = self._views.setdefault(name, RunData(paths))
            self._views.move_to_end(name)
            while len(self._views) > KEPT:
                self._views.popitem(last=False)[1].index.close()
        return view

    def summaries(self) -> list[dict[str, Any]]:
        """Summarize every run, anew when its files changed or it may have stopped meanwhile."""
        out = []
        for name, paths in self.found().items():
            state, now = run_state(paths), time.monotonic()
            known = self._summaries.get(name)
            running = known is not None and known[2]["status"] == "running"
            if known is None or known[0] != state or (running and now - known[1] > 5.0):
                known = self._summaries[name] = (state, now, summarize(paths))
            out.append(known[2])
        return out

    def close(self) -> None:
        with self._lock:
            for view in self._views.values():
                view.index.close()
            self._views.clear()


def run_state(paths: RunPaths) -> tuple[float, ...]:
    """Return times and sizes that differ when the run has grown."""
    state: list[float] = []
    for place in (paths.record, paths.metrics, paths.rollouts, paths.logs, paths.evaluations):
        with suppress(OSError):
            state.append(place.stat().st_mtime)
        if place in (paths.metrics, paths.logs):
            with suppress(OSError):
                state += sorted(entry.stat().st_size for entry in place.iterdir())
    return tuple(state)
