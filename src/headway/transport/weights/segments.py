"""Names of shared memory on one host: segments are files in memory, whose names carry the run and the process."""

import os
import re
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from headway.core.errors import HeadwayError

_NAME = re.compile(r"headway-.+-(?P<space>\d+)-(?P<pid>\d+)-(b\d+-.+|wanted)")
_PREFIX = re.compile(r"headway-.+-(?P<space>\d+)-(?P<pid>\d+)")


def prefix_of(run: str) -> str:
    """What this process's names for `run` begin with."""
    return "-".join(["headway", re.sub(r"[^\w.]+", "_", run), _process_space(), str(os.getpid())])


def segment(prefix: str, buffer: int, rank: int, slab: int) -> Path:
    return folder() / f"{prefix}-b{buffer}-r{rank}-s{slab}"


def table(prefix: str, buffer: int) -> Path:
    """Says what a buffer holds."""
    return folder() / f"{prefix}-b{buffer}-table"


def wanted(prefix: str) -> Path:
    """Is there when an engine can't use memory of the trainer's GPU."""
    return folder() / f"{prefix}-wanted"


def create(path: Path, size: int) -> Tensor:
    """A new segment in the place of an older one. Raises HeadwayError where there is no room for it."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    try:
        with path.open("r+b") as file:
            # Otherwise a full folder would show when it is written to, as a signal that ends the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise HeadwayError(
            f"{path.parent} has no room for {size / 1e9:.3g} GB more of weights ({error.strerror}); enlarge it "
            '(docker run --shm-size) or set weights.type = "filesystem"'
        ) from None
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def sweep() -> None:
    """Remove segments of processes that are gone."""
    for path in folder().glob("headway-*"):
        match = _NAME.fullmatch(path.name)
        if match and match["space"] == _process_space() and not _alive(int(match["pid"])):
            path.unlink(missing_ok=True)


def gone(prefix: str) -> bool:
    """Whether the process that made the segments has certainly ended."""
    match = _PREFIX.fullmatch(prefix)
    return bool(match and match["space"] == _process_space() and not _alive(int(match["pid"])))


def folder() -> Path:
    """Linux keeps shared memory here; elsewhere mapped temporary files serve as well."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def _process_space() -> str:
    """Which processes our process numbers count: containers may share memory, but not numbers."""
    try:
        return re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        return "0"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
