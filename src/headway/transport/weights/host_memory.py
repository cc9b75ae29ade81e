"""Named memory that processes of one host share: segments are files in memory, named by run and process."""

import os
import re
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.base.files import reserve

_NAME = re.compile(r"(?P<prefix>headway-.+-(?P<namespace>\d+)-(?P<pid>\d+))(-b\d+-.+|-wanted)?")


def prefix_of(run: str) -> str:
    """The beginning of this process's names for `run`."""
    return "-".join(["headway", re.sub(r"[^\w.]+", "_", run), _pid_namespace(), str(os.getpid())])


def segment_path(prefix: str, buffer: int, rank: int, piece: int) -> Path:
    """The path of one piece of a process's buffer."""
    return folder() / f"{prefix}-b{buffer}-r{rank}-s{piece}"


def table_path(prefix: str, buffer: int) -> Path:
    """The path of the table that describes a buffer."""
    return folder() / f"{prefix}-b{buffer}-table"


def wanted_path(prefix: str) -> Path:
    """The path of a file that exists once an engine can't use memory of the trainer's GPU."""
    return folder() / f"{prefix}-wanted"


def create_segment(path: Path, size: int) -> Tensor:
    """Make a segment, in the place of an older one. Raises HeadwayError where memory is full."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    try:
        with path.open("r+b") as file:
            reserve(file, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise HeadwayError(
            f"{path.parent} has no room for {size / 1e9:.3g} GB more of weights ({error.strerror}); enlarge it "
            '(docker run --shm-size) or set weights.type = "filesystem"'
        ) from None
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def remove_stale_segments() -> None:
    """Remove the segments of processes that have ended."""
    for path in folder().glob("headway-*"):
        match = _NAME.fullmatch(path.name)
        if match and owner_ended(match["prefix"]):
            path.unlink(missing_ok=True)


def owner_ended(prefix: str) -> bool:
    """Tell if the process that made the segments has certainly ended."""
    match = _NAME.fullmatch(prefix)
    # In another container, process ids mean other processes.
    if match is None or match["namespace"] != _pid_namespace():
        return False
    try:
        os.kill(int(match["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def folder() -> Path:
    """The folder of shared memory on Linux; elsewhere mapped temporary files serve as well."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def _pid_namespace() -> str:
    """The namespace that our process ids belong to: containers may share memory, but not process ids."""
    try:
        return re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        return "0"
