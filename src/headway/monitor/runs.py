"""Run folders: made once, never overwritten, found again by name."""

import getpass
import json
import os
import platform
import shutil
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

from headway import __version__
from headway.base.errors import HeadwayError, UsageError
from headway.base.files import sync_directory
from headway.config.shared import RunSettings
from headway.core.runs import RunPaths

FIRST_RANK_SECONDS = 120.0
"""Time that the other ranks of a group give the first one to create their run."""


def create_run(run: RunSettings, command: str, *, dry_run: bool = False, joined: str = "") -> RunPaths:
    """Make the folder of a new run and claim it with a record of who started it.

    Without a name the run is called by date, time and command, so that names sort. Raises UsageError when
    a run of that name exists, or when the folder holds anything but a dry run's settings and logs of refused starts.
    A dry run leaves the name free: the run itself may take it later. `joined` is the id of the run whose folder on
    this host it becomes.
    """
    attempt = 1
    while True:
        name = run.name or _generated_name(command, attempt)
        paths = RunPaths(run.output_dir / name)
        try:
            paths.root.mkdir(parents=True, exist_ok=True)
            if _is_free(paths.root) and (dry_run or _claim(paths, command, joined)):
                _make_folders(paths, dry_run)
                return paths
        except OSError as error:
            raise HeadwayError(_cannot_write(paths.root, error)) from None
        if run.name:
            raise UsageError(
                f"{paths.root} already exists; continue that run with --resume, or choose another --run.name"
            )
        attempt += 1


def open_run(folder: Path) -> RunPaths:
    """The paths of a run that exists. Raises UsageError when `folder` is not a run's."""
    paths = RunPaths(folder)
    if not paths.record.is_file():
        known = sorted(record.parent.name for record in folder.parent.glob("*/run.json"))[-3:]
        hint = f"; the latest runs there are {', '.join(known)}" if known else ""
        raise UsageError(f"{folder} is not a run folder{hint}")
    return paths


def discard_run(paths: RunPaths) -> None:
    """Remove the folder of a run that was refused before it recorded anything, so that its name is free again."""
    if not any(file.stat().st_size for file in paths.metrics.glob("*.jsonl")):
        shutil.rmtree(paths.root, ignore_errors=True)


def join_run(run: RunSettings, command: str) -> RunPaths:
    """Open the named run, or create it: for processes of one run that are started one by one.

    Of ranks that torchrun starts together the first creates the run, and the others wait for it. Raises UsageError when
    the run of several ranks has no name, and HeadwayError when the first rank's run does not appear.
    """
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if ranks > 1 and not run.name:
        raise UsageError(f"{ranks} ranks start together and each would make a run of its own; give it a --run.name")
    if run.name:
        paths = RunPaths(run.output_dir / run.name)
        if rank > 0:
            _wait_for_record(paths)
        if paths.record.is_file():
            return open_run(paths.root)
    return create_run(run, command)


def join_elsewhere(run: RunSettings, command: str, run_id: str) -> RunPaths:
    """Open or create this host's own folder of the run with id `run_id`, which another host has the record of.

    Of several ranks on this host the first creates it. Raises UsageError when the folder is another run's.
    """
    assert run.name is not None
    paths = RunPaths(run.output_dir / run.name)
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        _wait_for_record(paths)
    if not paths.record.is_file():
        try:
            return create_run(run, command, joined=run_id)
        except UsageError:
            if not paths.record.is_file():  # else a host that shares the folder was faster
                raise
    record = json.loads(paths.record.read_text())
    if run_id not in (record.get("id"), record.get("joined")):
        raise UsageError(f"{paths.root} holds another run; choose another --run.output_dir, or remove the folder")
    return paths


def _wait_for_record(paths: RunPaths) -> None:
    deadline = time.monotonic() + FIRST_RANK_SECONDS
    while not paths.record.is_file():
        if time.monotonic() > deadline:
            raise HeadwayError(
                f"{paths.root}: the first rank made no run there within {FIRST_RANK_SECONDS:.0f} s; ranks on several "
                "machines need a shared --run.output_dir, or join a run by its address with --run URL"
            )
        time.sleep(0.05)


def _generated_name(command: str, attempt: int) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"{stamp}-{command}" + (f"-{attempt}" if attempt > 1 else "")


def _is_free(root: Path) -> bool:
    return {entry.name for entry in root.iterdir()} <= {"config", "logs"}


def _claim(paths: RunPaths, command: str, joined: str) -> bool:
    """Write the record, whole and only if there is none: of two racing processes one gets the folder."""
    record = {
        "id": uuid.uuid4().hex,
        "joined": joined,
        "state": "starting",
        "command": command,
        "argv": sys.argv[1:],
        "started_at": time.time(),
        "headway": __version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "user": getpass.getuser(),
        "pid": os.getpid(),
    }
    aside = paths.root.with_name(f".{paths.root.name}.{uuid.uuid4().hex}.tmp")
    try:
        with aside.open("w") as file:
            json.dump(record, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.link(aside, paths.record)
    except FileExistsError:
        return False
    finally:
        aside.unlink(missing_ok=True)
    sync_directory(paths.root)
    return True


def _make_folders(paths: RunPaths, dry_run: bool) -> None:
    paths.config.mkdir(exist_ok=True)
    if dry_run:
        return
    for folder in (paths.logs, paths.metrics, paths.rollouts, paths.checkpoints, paths.weights):
        folder.mkdir(exist_ok=True)
    paths.control.mkdir(mode=0o700, exist_ok=True)


def _cannot_write(root: Path, error: OSError) -> str:
    with suppress(OSError):
        root.rmdir()
    return f"{root}: cannot make the run folder: {error.strerror}; choose another --run.output_dir"
