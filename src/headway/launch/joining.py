"""Joining a run by its address: its settings, and a folder of this host's own for its files."""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from headway.base.addresses import own_address
from headway.config.loader import load_settings
from headway.config.shared import SharedSettings
from headway.core.runs import RunPaths
from headway.launch.process import ManagedProcess, ProcessSpec
from headway.launch.supervisor import Supervisor
from headway.monitor.runs import join_elsewhere
from headway.transport.control.client import ControlClient, own_name
from headway.transport.control.tokens import TOKEN, find_token

S = TypeVar("S", bound=SharedSettings)


@dataclass(frozen=True)
class Joined(Generic[S]):
    """A run on another host, the settings of one of its processes, and this host's folder for it."""

    client: ControlClient
    settings: S
    paths: RunPaths


def join(
    url: str, process: str, kind: type[S], argv: Sequence[str], *, command: str, aliases: Mapping[str, str] = {}
) -> Joined[S]:
    """Ask the control service at `url` for the settings of a process, with `argv` on top, and make its folder here.

    Waits for a service that is not up yet. The folder is `run.output_dir`/<run>.<host> unless flags say otherwise.
    """
    client = ControlClient(url, find_token())
    # For what runs in other processes of this command, such as the workers of an engine.
    os.environ[TOKEN] = client.token
    status = client.wait()
    flags = ["--run.name", f"{status.run}.{own_name()}", "--run.output_dir", "outputs"]
    if process == "inference":
        flags += ["--inference.host", own_address(client.http.host), "--inference.port", "0"]
    with tempfile.TemporaryDirectory(prefix="headway-join-") as folder:
        file = Path(folder) / f"{process}.toml"
        file.write_bytes(client.settings(process))
        settings = load_settings(kind, ["@", str(file), *flags, *argv], aliases=aliases).settings
    return Joined(client, settings, join_elsewhere(settings.run, command, status.id))


def only_check(url: str, kind: type[SharedSettings], argv: Sequence[str], *, aliases: Mapping[str, str] = {}) -> bool:
    """With --dry-run among the flags, check them without asking the run, say so and return True."""
    if "--dry-run" not in argv:
        return False
    load_settings(kind, argv, aliases=aliases)
    print(f"these flags are accepted; the other settings come from {url}")
    return True


def keep_alive(name: str, argv: list[str], paths: RunPaths) -> bool:
    """Run `headway *argv` and start it again when it dies, until it is done (True) or this process is asked to stop."""
    spec = ProcessSpec(name, [sys.executable, "-m", "headway.cli.main", *argv], ends=True)
    return Supervisor([ManagedProcess(spec, paths.logs)], progress=lambda: 0, on_event=print).run()


def run_flags(paths: RunPaths) -> list[str]:
    """Return the flags that make a command use this run folder instead of making one."""
    return ["--run.name", paths.root.name, "--run.output_dir", str(paths.root.parent)]
