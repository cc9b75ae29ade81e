"""Calls of pip in this Python's environment."""

import os
import subprocess
import sys
from importlib.util import find_spec

from headway.base.errors import HeadwayError, UsageError


def run_pip(command: str, *words: str, epoch: str | None = None) -> None:
    """Run `pip COMMAND`. Raises HeadwayError with the lines that say what went wrong."""
    if find_spec("pip") is None:
        raise UsageError(f"{sys.executable} has no pip; get it with `{sys.executable} -m ensurepip`")
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    variables = {**os.environ, **({"SOURCE_DATE_EPOCH": epoch} if epoch else {})}
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, *quiet, *words],
        capture_output=True,
        text=True,
        env=variables,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR")] or lines
        raise HeadwayError(f"pip {command} failed: " + " ".join(said[-6:])[:1500])
