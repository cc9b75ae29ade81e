"""The lines that a run prints when it ends: what came of it, and what to do next."""

import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics


def summary_lines(paths: RunPaths, *, finished: bool, command: str = "rl") -> Iterator[str]:
    """Yield the summary of a run of `headway command` that finished, or was stopped."""
    trainer = list(read_metrics(paths.metrics / "trainer.jsonl"))
    orchestrator = list(read_metrics(paths.metrics / "orchestrator.jsonl"))
    step = int(trainer[-1]["step"]) if trainer else 0
    yield f"{'finished' if finished else 'stopped'} at step {step}"
    yield from map("  {}".format, _scores(orchestrator))
    run = shlex.quote(str(paths.root))
    commands = []
    if not finished:
        commands.append(("continue the run", f"headway {command} --resume {run}"))
    if any(paths.rollouts.glob("*.gz")):
        commands.append(("read what the model said", f"headway rollouts show {run}"))
    commands.append(("see all charts", f"headway dash {shlex.quote(str(paths.root.parent))}"))
    if model := newest_export(paths):
        commands.append(("talk to the model", f"headway serve {shlex.quote(str(model))}"))
    yield "next:"
    yield from (f"  {what:<26}{command}" for what, command in commands)


def newest_export(paths: RunPaths) -> Path | None:
    """Return the folder of the run's last Hugging Face checkpoint."""
    return max((folder for folder in paths.exports.glob("step_*") if "adapter" not in folder.name), default=None)


def _scores(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Say of the reward and of each evaluation what it was at first and what it is now."""
    names = dict.fromkeys(name for line in lines for name in line if name.startswith("eval/") and name.endswith("/avg"))
    for name in ("reward/mean", *names):
        values = [(int(line["step"]), line[name]) for line in lines if line.get(name) is not None]
        values = [(step, value) for step, value in values if math.isfinite(value)]
        if values:
            (first, before), (last, after) = values[0], values[-1]
            label = f"evaluation {name[5:-4]}" if name in names else "reward"
            yield f"{label}: {before:.3f} at step {first}, {after:.3f} at step {last}"
