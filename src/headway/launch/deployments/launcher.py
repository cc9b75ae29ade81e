"""Launchers: who starts the processes of a run on other machines. Every back end of `[deployment]` is one."""

import importlib
from typing import Protocol, cast

from headway.config.rl import RlSettings
from headway.core.runs import RunPaths


class Launcher(Protocol):
    """A back end: a module with these functions. `port` is the control service's where the user chose one."""

    def preview(self, settings: RlSettings, port: int | None) -> str:
        """Return what the scheduler would get, as text. Raises UsageError where it could not run."""

    def launch(self, settings: RlSettings, paths: RunPaths, port: int | None) -> bool:
        """Start the run and say where it is. Returns False where it was stopped before its end."""


def find_launcher(kind: str) -> Launcher:
    """Return the back end of a `deployment.type`. What it needs is imported when it starts a run."""
    return cast(Launcher, importlib.import_module(f"headway.launch.deployments.{kind}"))
