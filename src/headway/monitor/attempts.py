"""Attempts of a run: how each was started, with which versions, and how and why it ended, in `run.json`."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from headway import __version__
from headway.base.devices import query_gpus
from headway.base.errors import HeadwayError
from headway.base.files import write_atomic
from headway.core.runs import RunPaths

State = Literal["starting", "running", "finished", "failed", "stopped"]
ENDED = ("finished", "failed", "stopped")
PACKAGES = ("torch", "vllm", "transformers")
"""Packages whose versions are recorded, as far as they are installed."""


class Attempt:
    """One start of a run, from its beginning to its end."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._ended = False
        record = _read(paths)
        record["attempts"] = [*record.get("attempts", []), describe_attempt()]
        _write(paths, record | {"state": "running", "reason": "", "failed_log": ""})

    def end(self, state: State, reason: str = "", failed_log: str = "") -> None:
        """Record how it ended; the first to say so is believed. `failed_log` names the log of what failed."""
        if self._ended:
            return
        self._ended = True
        record = _read(self._paths)
        record["attempts"][-1] |= {"ended_at": time.time(), "state": state, "reason": reason}
        _write(self._paths, record | {"state": state, "reason": reason, "failed_log": failed_log})


@contextmanager
def recorded_attempt(paths: RunPaths) -> Iterator[Attempt]:
    """Record an attempt. It finished unless its body says otherwise, or raises: then it failed, or was interrupted."""
    attempt = Attempt(paths)
    try:
        yield attempt
    except KeyboardInterrupt:
        attempt.end("stopped", "interrupted")
        raise
    except BaseException as error:
        with suppress(OSError):  # on a full disk the error itself matters more
            attempt.end("failed", str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}")
        raise
    attempt.end("finished")


def describe_attempt() -> dict[str, Any]:
    """Return who starts something here and now, how, and with which versions."""
    return {
        "argv": sys.argv[1:],
        "started_at": time.time(),
        "host": platform.node(),
        "pid": os.getpid(),
        "headway": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "gpus": [name for (name,) in query_gpus("name")],
        **{package: found for package in PACKAGES if (found := _installed(package))},
    }


def gpus_of(paths: RunPaths) -> list[str]:
    """Return the names of the GPUs that the newest recorded attempt of a run had on its machine."""
    attempts = _read(paths).get("attempts") or [{}]
    return list(attempts[-1].get("gpus") or [])


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """Return the commit of the checkout that this package lies in; empty where it is an installed one."""
    source = Path(__file__).parent
    command = ["git", "-C", str(source), "rev-parse", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        if any((folder / ".git").exists() for folder in source.parents):
            return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return ""


def _read(paths: RunPaths) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(paths.record.read_text())
    return record


def _write(paths: RunPaths, record: dict[str, Any]) -> None:
    write_atomic(paths.record, json.dumps(record, indent=2))
