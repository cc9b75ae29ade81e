"""The dashboard's page of a plan: what a run was predicted to do beside what it did, and how else it could be laid
out."""

import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from headway.base.devices import resolve_device
from headway.base.errors import HeadwayError, UsageError
from headway.config.loader import load_settings
from headway.config.rl import RlSettings
from headway.core.runs import RunPaths
from headway.launch.placement import visible_gpus
from headway.monitor.dashboard.api import Handler, Query
from headway.monitor.dashboard.catalog import RunData, run_state
from headway.plan.calibration import find_calibration
from headway.plan.command import ask_for_gpus, ask_for_this_machine, gpu_here
from headway.plan.episodes import recorded_workload
from headway.plan.fitting import measured
from headway.plan.planning import Question, make_plan

SHOWN_SECONDS = 60.0
"""How long a plan stays before a run that goes on is planned anew, which takes seconds of a core."""


class PlanPage:
    """Plans of runs, by their folders. They are made one at a time."""

    def __init__(self) -> None:
        self._made: dict[Path, tuple[tuple[float, ...], float, Any]] = {}
        self._making = threading.Lock()

    def __call__(self, view: RunData, query: Query) -> Any:
        """Return the plan of a run as of a moment ago, or why there is none."""
        root, state = view.paths.root, run_state(view.paths)
        with self._making:
            known = self._made.get(root)
            if known is None or (known[0] != state and time.monotonic() - known[1] > self._patience(known[2])):
                known = self._made[root] = (state, time.monotonic(), _plan(view.paths))
            return known[2]

    @staticmethod
    def _patience(answer: Any) -> float:
        return 0.0 if "problem" in answer else SHOWN_SECONDS


def _plan(paths: RunPaths) -> Any:
    try:
        plan = make_plan(_question(paths))
    except HeadwayError as error:
        return {"problem": str(error)}
    return msgspec.to_builtins(plan)


def _question(paths: RunPaths) -> Question:
    """Ask for a plan without measuring anything: a page must not disturb the run that it shows."""
    file = paths.config / "rl.toml"
    if not file.exists():
        raise UsageError("Only runs of headway rl can be planned.")
    settings = load_settings(RlSettings, ["@", str(file)]).settings
    workload, seen = recorded_workload(paths), measured(paths)
    if find_calibration(settings) is not None:
        return ask_for_this_machine(settings, workload, lambda line: None, seen)
    device = resolve_device(settings.placement.device, bool(visible_gpus()))
    if device != "cpu" and (name := gpu_here()) is not None:
        return ask_for_gpus(settings, workload, name, None, seen)
    raise UsageError(
        f"{settings.model.path} has not been measured on this machine. Run `headway plan {paths.root}` here once, "
        "while nothing else runs (two minutes at most), then this page shows the plan; for a run on GPUs elsewhere "
        "the command is `headway plan RUN --gpu NAME`."
    )


def plan_routes() -> dict[str, Handler]:
    return {"/plan": PlanPage()}
