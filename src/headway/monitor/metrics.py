"""Metrics: one line of JSON per step and process, and any number of other sinks with the same names."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headway.base.errors import HeadwayError
from headway.base.files import write_atomic
from headway.core.runs import RunPaths
from headway.monitor.tail import LineTail


class Sink(Protocol):
    """Another destination of a step's metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Appends `{"step": s, "time": t, name: value, ...}` to `metrics/<process>.jsonl`.

    Numbers that are not finite become null. With `resume_step = k`, lines of later steps are dropped first, so
    that a resumed run writes each step once. A line is written whole or not at all; a full disk raises HeadwayError.

    The newest line is written to `metrics/<process>.newest` first: a step that a checkpoint has is not trained again,
    so a line of it that a crash or a bad disk cut off is put back from there.
    """

    def __init__(
        self, paths: RunPaths, process: str, *, resume_step: int | None = None, sinks: Sequence[Sink] = ()
    ) -> None:
        self.path = paths.metrics / f"{process}.jsonl"
        self._newest = self.path.with_suffix(".newest")
        self._sinks = list(sinks)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                _trim(self.path, resume_step, self._newest)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        line = msgspec.json.encode({"step": step, "time": time.time(), **{k: float(v) for k, v in values.items()}})
        try:
            write_atomic(self._newest, line + b"\n", durable=False)
            self._append(line + b"\n")
            for sink in self._sinks:
                sink.log(step, values)
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        while self._sinks:
            self._sinks.pop().close()

    def _append(self, line: bytes) -> None:
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, size)
            raise


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a metrics file in order. A line still being written at the end is left out."""
    return map(msgspec.json.decode, LineTail(path).lines())


def _trim(path: Path, resume_step: int | None, newest: Path) -> None:
    """Drop lines after `resume_step` and a last line that a crash left unfinished, unless `newest` has it whole."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _is_whole(line, resume_step)]
    if newest.exists() and (line := newest.read_bytes()) not in kept and _is_whole(line, resume_step):
        kept.append(line)
    if kept != lines:
        write_atomic(path, b"".join(kept))


def _is_whole(line: bytes, resume_step: int | None) -> bool:
    """True for a whole line of a step up to `resume_step`."""
    try:
        return line.endswith(b"\n") and (resume_step is None or int(msgspec.json.decode(line)["step"]) <= resume_step)
    except (msgspec.DecodeError, KeyError, TypeError):
        return False


def _cannot_write(path: Path, error: OSError) -> HeadwayError:
    return HeadwayError(f"{path}: cannot write metrics: {error.strerror}; free some space and continue with --resume")
