"""The sweep: removes what processes that were killed have left behind, and nothing else.

It trusts no state. What a name says (process id and start time) is checked against the processes that live.
"""

import contextlib
import logging
import os
import shutil
import signal
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from headway.base.errors import HeadwayError
from headway.sandboxes.local.cgroups import ROOT
from headway.sandboxes.local.owners import is_orphan, owned_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Swept:
    """Numbers of things that a sweep removed."""

    processes: int = 0
    groups: int = 0
    folders: int = 0


def state_root() -> Path:
    """The folder of this user's sandboxes. Raises HeadwayError where someone else made it."""
    root = Path(tempfile.gettempdir()) / f"headway-sandboxes-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o711)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise HeadwayError(f"{root} belongs to someone else, or others may write there; remove it or set TMPDIR")
    return root


def state_folder() -> Path:
    """Make a folder that belongs to this process, after a sweep. Sandboxes may enter it but not list it."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=owned_name() + "x", dir=state_root()))
    folder.chmod(0o711)
    return folder


def sweep(cgroup_root: Path = ROOT) -> Swept:
    """Kill processes, and remove groups and folders, whose owners have ended."""
    processes = groups = folders = 0
    for group in _orphaned_groups(cgroup_root):
        processes += _kill_all(group)
        with contextlib.suppress(OSError):
            group.rmdir()
            groups += 1
    root = state_root()
    for folder in root.iterdir():
        # The name is the owner's, and an "x" with the letters that made it unique.
        if is_orphan(folder.name.rpartition("x")[0]):
            processes += _kill_users_of(folder)
            shutil.rmtree(folder, ignore_errors=True)
            folders += not folder.exists()
    if processes or groups or folders:
        logger.info("removed what killed runs left: %d processes, %d groups, %d folders", processes, groups, folders)
    return Swept(processes, groups, folders)


def _orphaned_groups(root: Path) -> list[Path]:
    found = []
    for folder, names, _ in os.walk(root):
        found += [Path(folder, name) for name in names if is_orphan(name)]
    return found


def _kill_all(group: Path) -> int:
    """Kill the processes of a group, and those that they start meanwhile."""
    killed = 0
    for _ in range(200):
        try:
            pids = (group / "cgroup.procs").read_text().split()
        except OSError:
            return killed
        if not pids:
            return killed
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
                killed += 1
        time.sleep(0.01)
    return killed


def _kill_users_of(folder: Path) -> int:
    """Kill bubblewrap processes that were started with `folder`: where there are no groups, nothing else tells them."""
    killed = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"bwrap") and any(word.startswith(os.fsencode(f"{folder}/")) for word in words):
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
    return killed
