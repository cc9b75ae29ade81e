"""The dashboard's page of a swarm: who works for a run, how fast, what was accepted, what was refused and why."""

import threading
from collections import Counter, deque
from pathlib import Path
from typing import Any

import msgspec

from headway.core.runs import RunPaths
from headway.monitor.dashboard.api import Handler, Query
from headway.monitor.dashboard.catalog import RunData
from headway.swarm.trust.events import Judged, Ordered
from headway.swarm.trust.ledger import LedgerLine
from headway.swarm.trust.standing import Standing, Trust
from headway.swarm.work.traffic import read_traffic

REASONS = 20
"""Refusals that are shown with their reasons, the newest."""
MOST_WORKERS = 500
"""Workers that are shown, those with the most tokens first."""


class LedgerView:
    """The state of a ledger so far, read on from where it ended. Signatures are for `headway swarm audit`."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._trust = Trust()
        self._times: dict[str, tuple[float, float]] = {}
        self._refused: Counter[str] = Counter()
        self._reasons: deque[dict[str, Any]] = deque(maxlen=REASONS)
        self._reading = threading.Lock()

    def refresh(self) -> None:
        """Take in the lines that were written meanwhile."""
        with self._reading, self._path.open("rb") as file:
            file.seek(self._read)
            for text in file:
                if not text.endswith(b"\n"):  # it is being written
                    break
                self._read += len(text)
                self._add(msgspec.json.decode(text, type=LedgerLine))

    def _add(self, line: LedgerLine) -> None:
        event = line.event
        self._trust.apply(event)
        if isinstance(event, Ordered | Judged):
            first, _ = self._times.get(event.worker, (line.at, line.at))
            self._times[event.worker] = first, line.at
        if isinstance(event, Judged) and not event.verdict.accepted:
            self._refused[event.verdict.check] += 1
            said = {"at": line.at, "worker": event.worker, "check": event.verdict.check}
            self._reasons.appendleft(said | {"reason": event.verdict.reason})

    def shown(self, uploads: dict[str, int]) -> dict[str, Any]:
        """Return the page's tables. `uploads` are bytes by worker."""
        workers = sorted(self._trust.workers.items(), key=lambda item: -item[1].tokens)
        counts = [of for _, of in workers]
        return {
            "workers": [self._worker(key, of, uploads.get(key, 0)) for key, of in workers[:MOST_WORKERS]],
            "keys": len(workers),
            "accepted": sum(of.accepted for of in counts),
            "refused": sum(of.refused for of in counts),
            "tokens": sum(of.tokens for of in counts),
            "cut_off": sum(of.cut_off for of in counts),
            "refused_by": dict(self._refused.most_common()),
            "reasons": list(self._reasons),
        }

    def _worker(self, key: str, of: Standing, uploaded: int) -> dict[str, Any]:
        first, last = self._times.get(key, (0.0, 0.0))
        return {
            "key": key,
            "tokens": of.tokens,
            "per_second": of.tokens / (last - first) if last > first else 0.0,
            "accepted": of.accepted,
            "refused": of.refused,
            "abandoned": of.abandoned,
            "open": len(of.open),
            "strikes": of.strikes,
            "rescored": of.share,
            "cut_off": of.cut_off,
            "uploaded": uploaded,
            "last": last,
        }


class SwarmPage:
    """Swarms of runs, by their folders."""

    def __init__(self) -> None:
        self._views: dict[Path, LedgerView] = {}

    def __call__(self, view: RunData, query: Query) -> Any:
        """Return what is known of a run's swarm, or that it has none."""
        return self.of(view.paths)

    def of(self, paths: RunPaths) -> dict[str, Any]:
        ledger = paths.swarm / "ledger.jsonl"
        if not ledger.is_file():
            return {"problem": "No strangers work for this run (see `headway swarm serve`)."}
        known = self._views.setdefault(ledger, LedgerView(ledger))
        known.refresh()
        traffic = read_traffic(paths.swarm / "traffic.json")
        return known.shown(traffic.uploads) | {
            "weights_bytes": traffic.weights,
            "upload_bytes": sum(traffic.uploads.values()),
        }


def swarm_routes() -> dict[str, Handler]:
    return {"/swarm": SwarmPage()}
