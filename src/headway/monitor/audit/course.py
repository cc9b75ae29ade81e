"""The course of a run: its metrics over steps, and the rounds of its evaluations."""

import math
import re
from pathlib import Path

import msgspec
import numpy as np

from headway.core.runs import RunPaths
from headway.monitor.audit.table import Floats
from headway.monitor.tail import LineTail

_ROUND = re.compile(r"step_(\d+)_(.+)\.jsonl")


class Course:
    """The metrics of a run's orchestrator, step after step."""

    def __init__(self, paths: RunPaths) -> None:
        self._steps: dict[int, dict[str, float | None]] = {}
        for line in LineTail(paths.metrics / "orchestrator.jsonl").lines():
            try:
                values = msgspec.json.decode(line, type=dict[str, float | None])
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            self._steps.setdefault(int(values.get("step") or 0), {}).update(values)

    def column(self, name: str) -> Floats:
        """Return the values of a metric in the order of steps; NaN where a step has none."""
        values = (self._steps[step].get(name) for step in sorted(self._steps))
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


class _Scores(msgspec.Struct):
    task: str = ""
    rewards: list[float] = []


def read_rounds(folder: Path) -> dict[str, dict[int, dict[str, float]]]:
    """Read the mean reward of each task, by environment and step. Damaged lines are left out."""
    rounds: dict[str, dict[int, dict[str, float]]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        if match := _ROUND.fullmatch(file.name):
            rounds.setdefault(match[2], {})[int(match[1])] = _read_round(file)
    return rounds


def _read_round(file: Path) -> dict[str, float]:
    out = {}
    for line in LineTail(file).lines():
        try:
            task = msgspec.json.decode(line, type=_Scores)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if task.rewards:
            out[task.task] = sum(task.rewards) / len(task.rewards)
    return out
