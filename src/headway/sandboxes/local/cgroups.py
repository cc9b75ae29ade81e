"""Control groups: memory, processes and cpu of a sandbox, with version 1 or 2 of the kernel's interface."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from headway.sandboxes.sandbox import Limit, Limits

ROOT = Path("/sys/fs/cgroup")
_PERIOD = 100_000
_V1 = ("memory", "pids", "cpu")


@dataclass(frozen=True)
class Cgroup:
    """One sandbox's groups. `folders` is one folder (version 2) or one by controller (version 1)."""

    folders: tuple[Path, ...]
    settings: tuple[tuple[str, str], ...]
    """Files to write, relative to the folder that has them, when the groups are made."""

    def exceeded(self) -> Limit | None:
        """The limit that was hit since the group was made, if any: memory before processes."""
        if self._count("memory.oom_control", "oom_kill") or self._count("memory.events", "oom_kill"):
            return "memory"
        return "processes" if self._count("pids.events", "max") else None

    def _count(self, file: str, name: str) -> int:
        for folder in self.folders:
            with contextlib.suppress(OSError):
                lines = (line.split() for line in (folder / file).read_text().splitlines())
                return next((int(line[1]) for line in lines if line[0] == name), 0)
        return 0


class Cgroups:
    """The place where groups can be made: below this process's own, so that its limits still hold.

    `problem` says why none can be; then rlimits are all there is.
    """

    def __init__(self, root: Path = ROOT, own: str | None = None) -> None:
        self._parents: tuple[Path, ...] = ()
        self.problem: str | None = None
        lines = (own if own is not None else _own_groups()).splitlines()
        paths = {kind: path for _, kinds, path in (line.split(":", 2) for line in lines) for kind in kinds.split(",")}
        if all((root / kind).is_dir() and kind in paths for kind in _V1):
            self._parents = tuple(root / kind / paths[kind].lstrip("/") for kind in _V1)
            self.version = 1
        else:
            self._parents = (root / paths.get("", "/").lstrip("/"),)
            self.version = 2
            self.problem = self._enable_v2()
        if self.problem is None and not all(os.access(parent, os.W_OK) for parent in self._parents):
            self.problem = f"{self._parents[0]} is not writable"

    def group(self, name: str, limits: Limits) -> Cgroup:
        quota = int(limits.cpus * _PERIOD)
        if self.version == 1:
            settings = (
                ("0/memory.limit_in_bytes", str(limits.memory)),
                ("1/pids.max", str(limits.processes)),
                ("2/cpu.cfs_period_us", str(_PERIOD)),
                ("2/cpu.cfs_quota_us", str(quota)),
            )
        else:
            settings = (
                ("0/memory.max", str(limits.memory)),
                ("0/memory.swap.max", "0"),
                ("0/pids.max", str(limits.processes)),
                ("0/cpu.max", f"{quota} {_PERIOD}"),
            )
        return Cgroup(tuple(parent / name for parent in self._parents), settings)

    def _enable_v2(self) -> str | None:
        """Hand the controllers down to groups below ours. The kernel refuses while processes sit in ours."""
        parent = self._parents[0]
        try:
            wanted = {"memory", "pids", "cpu"} - set((parent / "cgroup.subtree_control").read_text().split())
            if wanted:
                (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(wanted)))
        except OSError as error:
            return f"{parent} hands no controllers down ({error.strerror})"
        return None


def _own_groups() -> str:
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:  # not Linux
        return ""
