"""A run's status from its folder: step, version, engines, checkpoints."""

import os
import tomllib
from typing import Any

import msgspec

from headway.core.control import RunStatus
from headway.core.runs import RunPaths
from headway.transport.control.folder import FolderControl

_TAIL_BYTES = 1 << 16


def read_status(paths: RunPaths, control: FolderControl) -> RunStatus:
    update = control.latest()
    return RunStatus(
        run=paths.root.name,
        id=run_id(paths),
        step=_newest_step(paths),
        max_steps=_max_steps(paths),
        version=update.version if update else -1,
        stop=control.stop_asked(),
        finished=control.finished(),
        ended=False,
        engines=control.engines(),
        checkpoints=control.checkpoints(),
    )


def run_id(paths: RunPaths) -> str:
    """Return the run's own id, by which a joined host knows its folder again; "" for runs without a record of it."""
    return str(_json(paths.record.read_bytes()).get("id", "")) if paths.record.is_file() else ""


def _newest_step(paths: RunPaths) -> int:
    """Read the step of the last whole line of the trainer's metrics; 0 where there is none."""
    try:
        with (paths.metrics / "trainer.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            whole, _, _ = file.read().rpartition(b"\n")
    except FileNotFoundError:
        return 0
    return int(_json(whole.rpartition(b"\n")[2]).get("step", 0))


def _max_steps(paths: RunPaths) -> int:
    for name in ("rl", "orchestrator", "trainer"):
        try:
            return int(tomllib.loads((paths.config / f"{name}.toml").read_text()).get("max_steps", 0))
        except (OSError, ValueError):
            continue
    return 0


def _json(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
