"""The timeline: what each process was doing when, as far as its metrics say."""

from typing import Any

import numpy as np

from headway.core.runs import RunPaths
from headway.monitor.dashboard.logs import attempts
from headway.monitor.dashboard.table import Floats, MetricTable

MOST_SPANS = 4000
"""Spans of one lane that are sent to the browser; of more, only the longest are."""


def lanes(tables: dict[str, MetricTable], low: float, high: float) -> list[dict[str, Any]]:
    """Return per lane a name and spans `[from, to, what, step]` within the times `low..high`, in order.

    `thinned` tells whether short ones were left out, `shares` that spans divide a step instead of following each other.
    """
    out = []
    for process in ("trainer", "sft"):
        if process in tables:
            out.append(_lane(process, _trainer(tables[process]), low, high))
    if "orchestrator" in tables:
        table = tables["orchestrator"]
        out.append(_lane("orchestrator", _orchestrator(table), low, high))
        out.append(_lane("engines", _engines(table), low, high))
        if "episode_seconds/engine" in table.names:
            lane = _lane("environments", _environments(table), low, high)
            out.append(lane | {"shares": True, "lost": _lost(table, low, high)})
    return out


def levels(tables: dict[str, MetricTable], low: float, high: float, points: int) -> list[dict[str, Any]]:
    """Return sampled tokens/s and episodes in flight over time, each as times and values."""
    table = tables.get("orchestrator")
    if table is None:
        return []
    out = []
    for name, title in (("tokens_per_second", "sampling, tokens/s"), ("in_flight", "episodes in flight")):
        times, values = table.column("time"), table.column(name)
        inside = (times >= low) & (times <= high) & np.isfinite(values)
        stride = max(1, int(inside.sum()) // points)
        out.append(
            {"name": title, "times": times[inside][::stride].tolist(), "values": values[inside][::stride].tolist()}
        )
    return out


def restarts(paths: RunPaths, tables: dict[str, MetricTable]) -> list[dict[str, Any]]:
    """List every start of a process after its first, with the run's step at that time where it is known."""
    table = max(tables.values(), key=len, default=None)
    times = table.column("time") if table is not None else np.zeros(0)
    steps = table.steps() if table is not None else np.zeros(0)
    out = []
    for start in attempts(paths.logs):
        if start["attempt"] == 1:
            continue
        at, known = start["time"], np.isfinite(times)
        if at is None or not known.any() or at > times[known].max():
            out.append(start | {"time": None, "step": None})
            continue
        out.append(start | {"step": float(steps[known][int(np.argmax(times[known] >= at))])})
    return out


Spans = list[tuple[Floats, Floats, str]]


def _trainer(table: MetricTable) -> tuple[Floats, Spans]:
    """A line is written when its step has ended; publishing is the end of the step, waiting comes before it."""
    end = table.column("time")
    step, wait, publish = (_seconds(table, name) for name in ("step_seconds", "wait_seconds", "publish_seconds"))
    return table.steps(), [
        (end - step - wait, end - step, "wait for rollouts"),
        (end - step, end - publish, "step"),
        (end - publish, end, "publish"),
    ]


def _orchestrator(table: MetricTable) -> tuple[Floats, Spans]:
    """A line is written when its batch is sent; a batch that had to wait for the trainer did so at the end."""
    end = table.column("time")
    step, wait = _seconds(table, "step_seconds"), _seconds(table, "wait_for_trainer_seconds")
    return table.steps(), [(end - step, end - wait, "collect"), (end - wait, end, "wait for trainer")]


def _engines(table: MetricTable) -> tuple[Floats, Spans]:
    """Updates are recorded by the step in which they ended; the slowest one is drawn at its end."""
    end, update = table.column("time"), _seconds(table, "weights/update_seconds")
    begin = end - np.maximum(_seconds(table, "step_seconds"), update)
    return table.steps(), [(begin, end - update, "serve"), (end - update, end, "update weights")]


def _environments(table: MetricTable) -> tuple[Floats, Spans]:
    """Divide a step by how its episodes spent their time: episodes overlap, so the parts have no order."""
    end, step = table.column("time"), _seconds(table, "step_seconds")
    names = ("engine", "environment", "reward")
    parts = [_seconds(table, f"episode_seconds/{name}") for name in names]
    whole = np.maximum(sum(parts), 1e-9)
    edges = [end - step, *(end - step + step * np.minimum(part / whole, 1.0) for part in np.cumsum(parts, axis=0))]
    kinds = ("in engines", "in environments", "scoring")
    return table.steps(), [(edges[i], edges[i + 1], kind) for i, kind in enumerate(kinds)]


def _lost(table: MetricTable, low: float, high: float) -> list[tuple[float, float, float]]:
    """List time, number of lost workers and step, for each step that lost any."""
    rows = zip(
        table.column("time").tolist(), table.column("workers/lost").tolist(), table.steps().tolist(), strict=True
    )
    return [row for row in rows if row[1] > 0 and low <= row[0] <= high]


def _seconds(table: MetricTable, name: str) -> Floats:
    return np.nan_to_num(table.column(name), nan=0.0)


def _lane(name: str, drawn: tuple[Floats, Spans], low: float, high: float) -> dict[str, Any]:
    steps, spans = drawn
    rows = [
        (float(begin), float(end), what, float(step))
        for begins, ends, what in spans
        for begin, end, step in zip(begins, ends, steps, strict=True)
        if end > begin and end >= low and begin <= high
    ]
    thinned = len(rows) > MOST_SPANS
    if thinned:
        shortest = sorted((row[1] - row[0] for row in rows), reverse=True)[MOST_SPANS - 1]
        rows = [row for row in rows if row[1] - row[0] >= shortest][:MOST_SPANS]
    return {"name": name, "spans": sorted(rows), "thinned": thinned}
