"""What sandboxes of a process have left on this machine."""

import os
import time
from pathlib import Path

from headway.sandboxes.local.cgroups import ROOT
from headway.sandboxes.local.sweep import state_root, sweep


def leftovers(owner: int) -> list[str]:
    """Everything on this machine that names process `owner` as its own."""
    mark = f"headway-{owner}-"
    found = [str(path) for path in state_root().iterdir() if path.name.startswith(mark)]
    for folder, names, _ in os.walk(ROOT):
        found += [f"{folder}/{name}" for name in names if name.startswith(mark)]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if mark in line]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(str(path))
        except OSError:
            continue
    return found


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def swept_clean(owner: int) -> bool:
    """Sweep until nothing of a process that was killed is left; False where something stays."""
    deadline = time.monotonic() + 120
    while leftovers(owner) and time.monotonic() < deadline:
        sweep()
    return leftovers(owner) == []
