"""An index of a run's rollouts: a few dozen bytes for each, built in the background, newest steps first."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.records import rollout_lines, rollout_step, short_group
from headway.core.runs import RunPaths
from headway.monitor.tail import LONGEST_LINE

ROW = np.dtype(
    [
        ("step", "i4"),
        ("line", "i4"),
        ("reward", "f4"),
        ("advantage", "f4"),
        ("lag", "i2"),
        ("tokens", "i4"),
        ("seconds", "f4"),
        ("env", "i2"),
        ("error", "i2"),
        ("group", "S8"),
        ("task", "S16"),
    ]
)
Rows = NDArray[np.void]
SETTLED = 2_000_000_000
"""Nanoseconds after which a folder's time tells that nothing has changed since; clocks of file systems are coarse."""
BLOCK = 1 << 16
"""Rows are kept in blocks of this many, so that growing never copies what is there."""


class _Task(msgspec.Struct):
    id: str = ""


class _Error(msgspec.Struct):
    kind: str = ""


class _Sample(msgspec.Struct):
    advantage: float = 0.0
    tokens: int = 0


class _Episode(msgspec.Struct):
    task: _Task = msgspec.field(default_factory=_Task)
    error: _Error | None = None
    timings: dict[str, float] = msgspec.field(default_factory=dict)


class _Line(msgspec.Struct):
    """The fields of a record that the index keeps; the decoder skips the rest without building it."""

    env: str
    group: str
    reward: float
    lag: int = 0
    episode: _Episode = msgspec.field(default_factory=_Episode)
    samples: list[_Sample] = msgspec.field(default_factory=list)


@dataclass(frozen=True)
class Filter:
    """The rollouts to list. `sort` is step, reward, advantage, lag, tokens or seconds."""

    step: int | None = None
    env: str = ""
    error: str = ""
    group: str = ""
    min_reward: float = -np.inf
    max_reward: float = np.inf
    sort: str = "step"
    descending: bool = True


class RolloutIndex:
    """Rows of all recorded rollouts. Queries answer from what has been read so far and report how much that is."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._blocks: list[Rows] = []
        self._used = 0
        self._spans: dict[int, tuple[int, int]] = {}
        self._stamps: dict[int, tuple[int, int]] = {}
        self._names: dict[str, list[str]] = {"env": [], "error": [""]}
        self._files = 0
        self._listed: tuple[int, dict[int, tuple[int, int]]] = (0, {})
        self._thread: threading.Thread | None = None
        self._closed = False
        self._found: tuple[object, NDArray[np.intp]] = (None, np.zeros(0, dtype=np.intp))

    def refresh(self, step: int | None = None) -> None:
        """Look for new files; read `step` at once, and the others in the background."""
        files = self._listing()
        self._files = len(files)
        missing = [(number, stamp) for number, stamp in files.items() if self._stamps.get(number) != stamp]
        if step is None and not self._spans:
            step = max(files, default=None)  # so that the first page is not empty
        if step is not None and any(number == step for number, _ in missing):
            self._read(step, files[step])
        if missing and (self._thread is None or not self._thread.is_alive()) and not self._closed:
            self._thread = threading.Thread(target=self._build, name="rollout-index", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until everything that was there at the last refresh is read."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self._closed = True

    def progress(self) -> dict[str, Any]:
        with self._lock:
            rows = sum(stop - start for start, stop in self._spans.values())
            return {"steps": self._files, "indexed": len(self._spans), "rollouts": rows, **self._named()}

    def select(self, wanted: Filter) -> NDArray[np.intp]:
        """Return the row numbers that match, in order. The last answer is kept, so that paging through it is free."""
        with self._lock:
            key = (wanted, self._used, len(self._spans))
            if self._found[0] == key:
                return self._found[1]
            found, order = self._matching_rows(wanted, "step")
            if wanted.sort != "step":
                _, values = self._matching_rows(wanted, wanted.sort)
                found = found[np.lexsort((order, -values if wanted.descending else values))]
            else:
                by_step = np.argsort(order, kind="stable")
                found = found[by_step if wanted.descending else by_step[::-1]]
            self._found = (key, found)
            return found

    def rows(self, numbers: NDArray[np.intp]) -> list[dict[str, Any]]:
        with self._lock:
            return [self._as_dict(self._blocks[number // BLOCK][number % BLOCK]) for number in numbers.tolist()]

    def heat(self, column: str, buckets: int, bins: int, env: str = "") -> dict[str, Any]:
        """Count how often values of `column` occur over steps: counts[bucket][bin], with the edges of both."""
        with self._lock:
            kept = [(rows, self._matching(rows, Filter(env=env))) for rows in self._filled()]
            parts = [(rows["step"][keep], rows[column][keep]) for rows, keep in kept if keep.any()]
        if not parts:
            return {"steps": [], "values": [], "counts": []}
        first, last = min(int(steps.min()) for steps, _ in parts), max(int(steps.max()) for steps, _ in parts) + 1
        low, high = min(float(values.min()) for _, values in parts), max(float(values.max()) for _, values in parts)
        if column == "lag":
            low, bins = -0.5, min(int(high), bins) + 1
            high = low + bins
        across, along = np.linspace(first, last, min(buckets, last - first) + 1), np.linspace(low, high, bins + 1)
        counts = np.zeros((len(across) - 1) * bins, dtype=np.int64)
        for steps, values in parts:
            bucket = (steps - first) * (len(across) - 1) // (last - first)
            place = ((values - low) * (bins / ((high - low) or 1.0))).astype(np.int32).clip(0, bins - 1)
            counts += np.bincount(bucket * bins + place, minlength=len(counts))
        return {"steps": across.tolist(), "values": along.tolist(), "counts": counts.reshape(-1, bins).tolist()}

    def records(self, step: int) -> Iterator[bytes]:
        """The raw lines of a step; nothing where there is no readable file."""
        if step in self._listing():
            yield from rollout_lines(self._paths.rollout_records(step), LONGEST_LINE)

    def stamp(self, step: int) -> tuple[int, int] | None:
        """Return a mark that changes when the records of a step are replaced."""
        return self._listing().get(step)

    def _build(self) -> None:
        for step, stamp in sorted(self._listing().items(), reverse=True):
            if self._closed:
                return
            if self._stamps.get(step) != stamp:
                self._read(step, stamp)

    def _listing(self) -> dict[int, tuple[int, int]]:
        """Steps with a mark of their files. Looked up again when the folder has changed, or did so just now."""
        try:
            changed = self._paths.rollouts.stat().st_mtime_ns
            if changed != self._listed[0] or time.time_ns() - changed < SETTLED:
                entries = [(rollout_step(entry.name), entry.stat()) for entry in _scan(self._paths.rollouts)]
                files = {step: (mark.st_mtime_ns, mark.st_size) for step, mark in entries if step is not None}
                self._listed = (changed, files)
        except OSError:
            self._listed = (0, {})
        return self._listed[1]

    def _read(self, step: int, stamp: tuple[int, int]) -> None:
        parsed: list[tuple[int, _Line]] = []
        decode = msgspec.json.Decoder(_Line).decode
        for number, line in enumerate(rollout_lines(self._paths.rollout_records(step), LONGEST_LINE)):
            try:
                parsed.append((number, decode(line)))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
        with self._lock:
            if self._stamps.get(step) == stamp:
                return
            fresh = np.array([self._row(step, number, line) for number, line in parsed], dtype=ROW)
            if step in self._spans:  # a later attempt replaced the file; the old rows stay, out of every answer
                for number in range(*self._spans[step]):
                    self._blocks[number // BLOCK]["step"][number % BLOCK] = -1
            self._append(fresh)
            self._spans[step] = (self._used - len(fresh), self._used)
            self._stamps[step] = stamp

    def _append(self, fresh: Rows) -> None:
        while len(fresh):
            if self._used == len(self._blocks) * BLOCK:
                self._blocks.append(np.zeros(BLOCK, dtype=ROW))
            start = self._used % BLOCK
            fits = min(BLOCK - start, len(fresh))
            self._blocks[-1][start : start + fits] = fresh[:fits]
            self._used, fresh = self._used + fits, fresh[fits:]

    def _filled(self) -> list[Rows]:
        return [block[: self._used - place * BLOCK] for place, block in enumerate(self._blocks)]

    def _matching_rows(self, wanted: Filter, column: str) -> tuple[NDArray[np.intp], NDArray[Any]]:
        """Return the numbers of matching rows and a column; steps become a key: newest first, then by line."""
        numbers, values = [np.zeros(0, dtype=np.intp)], [np.zeros(0, dtype=np.int64)]
        for place, rows in enumerate(self._filled()):
            found = np.flatnonzero(self._matching(rows, wanted))
            numbers.append(found + place * BLOCK)
            chosen = rows[column][found]
            values.append(chosen.astype(np.int64) * (-1 << 32) + rows["line"][found] if column == "step" else chosen)
        return np.concatenate(numbers), np.concatenate(values if column == "step" else values[1:] or values)

    def _row(self, step: int, number: int, line: _Line) -> tuple[Any, ...]:
        samples = line.samples
        advantage = sum(sample.advantage for sample in samples) / len(samples) if samples else np.nan
        return (
            step,
            number,
            line.reward,
            advantage,
            _bounded(line.lag, 2**15 - 1),
            _bounded(sum(sample.tokens for sample in samples), 2**31 - 1),
            line.episode.timings.get("total", np.nan),
            self._number("env", line.env),
            self._number("error", line.episode.error.kind if line.episode.error is not None else ""),
            short_group(line.group).encode(),
            line.episode.task.id.encode()[:16],
        )

    def _number(self, kind: str, name: str) -> int:
        names = self._names[kind]
        if name not in names:
            names.append(name)
        return min(names.index(name), 2**15 - 1)

    def _matching(self, rows: Rows, wanted: Filter) -> NDArray[np.bool_]:
        keep: NDArray[np.bool_] = rows["step"] >= 0 if wanted.step is None else rows["step"] == wanted.step
        for kind, name in (("env", wanted.env), ("error", wanted.error)):
            if name == "any":
                keep &= rows[kind] > 0
            elif name:
                keep &= rows[kind] == (self._names[kind].index(name) if name in self._names[kind] else -1)
        if wanted.group:
            keep &= rows["group"] == short_group(wanted.group).encode()
        if np.isfinite(wanted.min_reward):
            keep &= rows["reward"] >= wanted.min_reward - 1e-6
        if np.isfinite(wanted.max_reward):
            keep &= rows["reward"] <= wanted.max_reward + 1e-6
        return keep

    def _as_dict(self, row: Any) -> dict[str, Any]:
        out = {name: row[name].item() for name in ("step", "line", "reward", "advantage", "lag", "tokens", "seconds")}
        out |= {kind: self._names[kind][int(row[kind])] for kind in ("env", "error")}
        return out | {name: row[name].decode(errors="replace") for name in ("group", "task")}

    def _named(self) -> dict[str, list[str]]:
        return {"envs": list(self._names["env"]), "errors": [name for name in self._names["error"] if name]}


def _bounded(number: int, limit: int) -> int:
    """Keep a number of a strange record within its column."""
    return max(-limit, min(number, limit))


def _scan(folder: Path) -> list[Any]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if entry.is_file(follow_symlinks=False)]
