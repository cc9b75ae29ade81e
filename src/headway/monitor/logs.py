"""Logging: readable on a console, plain in files (one per process and attempt), JSON on request."""

import json as json_module
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TextIO

from headway.base.errors import HeadwayError
from headway.core.runs import RunPaths

SUPERVISED = "HEADWAY_LOG"
"""Set to the path of the log file when stdout and stderr go there."""

_COLORS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31;1m"}


def setup_logging(process: str, paths: RunPaths | None = None, json: bool = False, level: str = "INFO") -> None:
    """Send the `headway` loggers to stderr and, with `paths`, to a new file `logs/<process>_<attempt>.log`.

    Where a supervisor has opened that file for all of the process's output, stderr is the file already.
    Calling it again replaces what the last call set up. Raises HeadwayError when the file cannot be made.
    """
    root = logging.getLogger("headway")
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    root.propagate = False
    console = logging.StreamHandler(sys.stderr)
    supervised = SUPERVISED in os.environ
    readable = PlainFormatter(process) if supervised else ConsoleFormatter(process, color=sys.stderr.isatty())
    console.setFormatter(JsonFormatter(process) if json else readable)
    root.addHandler(console)
    if paths is not None and not supervised:
        file = LogFile(next_log(paths.logs, process))
        file.setFormatter(JsonFormatter(process) if json else PlainFormatter(process))
        root.addHandler(file)


def record_crash(error: BaseException) -> Path | None:
    """Write an unexpected error's traceback to the log file only. Returns the file's path, or None without one."""
    if SUPERVISED in os.environ:
        traceback.print_exception(error)
        return Path(os.environ[SUPERVISED])
    for handler in logging.getLogger("headway").handlers:
        if isinstance(handler, LogFile) and handler.healthy:
            text = "".join(traceback.format_exception(error))
            handler.handle(logging.LogRecord("headway", logging.CRITICAL, "", 0, text, None, None))
            return handler.path
    return None


class LogFile(logging.FileHandler):
    """A log file that cannot bring the process down: when a write fails, it reports that once and stops writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.healthy = True
        super().__init__(path, encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        if self.healthy:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.healthy = False
        print(f"headway: {self.path}: {error.strerror}; continuing without this log file", file=sys.stderr)

    def close(self) -> None:
        # What could not be written will fail again when the stream is flushed; that was reported already.
        try:
            super().close()
        except OSError:
            self.stream: TextIO | None = None  # type: ignore[assignment]


class PlainFormatter(logging.Formatter):
    """`2026-01-31 12:00:00 INFO trainer loop: message`"""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(component)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.component = record.name.removeprefix("headway.")
        return super().format(record)


class ConsoleFormatter(logging.Formatter):
    """`12:00:00 trainer  message`, with the level in front of anything above INFO."""

    def __init__(self, process: str, color: bool) -> None:
        super().__init__(f"%(asctime)s {process:<12} %(sign)s%(message)s", "%H:%M:%S")
        self.color = color

    def format(self, record: logging.LogRecord) -> str:
        record.sign = f"{record.levelname.lower()}: " if record.levelno != logging.INFO else ""
        text = super().format(record)
        paint = _COLORS.get(record.levelno) if self.color else None
        return f"{paint}{text}\x1b[0m" if paint else text


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, process, logger, message, and the traceback as `error`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json_module.dumps(line, ensure_ascii=False)


def next_log(folder: Path, process: str) -> Path:
    """Make the empty log file of a process's next attempt. Raises HeadwayError when that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 10_000):
            path = folder / f"{process}_{attempt:03d}.log"
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise HeadwayError(f"{folder}: cannot write logs: {error.strerror}; choose another --run.output_dir") from None
    raise HeadwayError(f"{folder}: ten thousand attempts of {process} are there already; start a new run")
