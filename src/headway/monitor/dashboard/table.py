"""The metrics of one process as columns over steps: read as they grow, thinned out for the browser."""

import math
import threading
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.monitor.tail import LineTail

Floats = NDArray[np.float64]

LAST_STEP = 2**31 - 1
"""Lines of later steps are nonsense."""
MOST_COLUMNS = 2000
"""Names beyond this many are left out, so that memory stays bounded."""


class MetricTable:
    """One row per step. Lines of the same step are merged, so that an evaluation joins the step it belongs to."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self._lock = threading.Lock()
        self._clear()

    def refresh(self) -> None:
        """Read what was appended; start over when the file was replaced (a resumed run drops lines)."""
        with self._lock:
            if not self._tail.changed():
                return
            first = True
            for line in self._tail.lines():
                if first and self._tail.replaced:
                    self._clear()
                first = False
                self._add(line)
            if first and self._tail.replaced:
                self._clear()

    @property
    def names(self) -> list[str]:
        return sorted(name for name in self._columns if name != "time")

    def __len__(self) -> int:
        return len(self._steps)

    def column(self, name: str) -> Floats:
        """Return values in the order of steps; NaN where a step has none."""
        with self._lock:
            return self._values(name, self._order())

    def steps(self) -> Floats:
        with self._lock:
            return np.array(self._steps, dtype=np.float64)[self._order()]

    def select(
        self, names: Iterable[str], points: int, low: float = -math.inf, high: float = math.inf
    ) -> dict[str, Any]:
        """Return `step`, `time` and the named columns of steps `low..high`, each at most `points` long."""
        with self._lock:
            order = self._order()
            steps = np.array(self._steps, dtype=np.float64)[order]
            inside = (steps >= low) & (steps <= high)
            order, steps = order[inside], steps[inside]
            wanted = [name for name in names if name in self._columns]
            columns = {name: self._values(name, order) for name in wanted}
            times = self._values("time", order)
        thin = Thinner(len(steps), points)
        return {
            "step": _numbers(thin.ends(steps)),
            "time": _numbers(thin.ends(times), digits=14),
            "columns": {name: _numbers(thin.extremes(values)) for name, values in columns.items()},
        }

    def _clear(self) -> None:
        self._steps: array[int] = array("q")
        self._rows: dict[int, int] = {}
        self._columns: dict[str, array[float]] = {}
        self._sorted = True

    def _add(self, line: bytes) -> None:
        try:
            values = msgspec.json.decode(line, type=dict[str, float | None])
            step = int(values.pop("step") or 0)
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, OverflowError, ValueError):
            return
        if abs(step) > LAST_STEP:
            return
        known = step in self._rows
        row = self._rows.setdefault(step, len(self._steps))
        if not known:
            self._sorted = self._sorted and (not self._steps or step > self._steps[-1])
            self._steps.append(step)
        elif all(name.startswith("eval/") for name in values if name != "time"):
            values.pop("time", None)  # the step's own time stays
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MOST_COLUMNS:
                    continue
                column = self._columns[name] = array("d")
            number = math.nan if value is None else value
            if len(column) == row:
                column.append(number)
            else:
                column.extend([math.nan] * (row + 1 - len(column)))
                column[row] = number

    def _order(self) -> NDArray[np.intp]:
        if self._sorted:
            return np.arange(len(self._steps))
        return np.argsort(np.array(self._steps, dtype=np.int64), kind="stable")

    def _values(self, name: str, order: NDArray[np.intp]) -> Floats:
        out = np.full(len(self._steps), np.nan)
        column = self._columns.get(name)
        if column is not None:
            out[: len(column)] = np.array(column, dtype=np.float64)
        return out[order]


class Thinner:
    """Makes long columns short without losing peaks: two points per bucket, its smallest and its largest value.

    All columns of a table share the buckets, so that they share an x axis: the first and last step of each.
    """

    def __init__(self, rows: int, points: int) -> None:
        self.whole = rows <= max(points, 2)
        edges = np.linspace(0, rows, max(points, 2) // 2 + 1).astype(np.intp)
        self.starts = np.unique(edges[:-1])
        self.lasts = np.append(self.starts[1:], rows) - 1

    def ends(self, values: Floats) -> Floats:
        return values if self.whole else np.stack([values[self.starts], values[self.lasts]], axis=1).ravel()

    def extremes(self, values: Floats) -> Floats:
        if self.whole:
            return values
        missing = np.isnan(values)
        low = np.minimum.reduceat(np.where(missing, np.inf, values), self.starts)
        high = np.maximum.reduceat(np.where(missing, -np.inf, values), self.starts)
        falling = values[self.starts] > values[self.lasts]
        pair = np.where(falling, (high, low), (low, high)).T.ravel()
        return np.where(np.isinf(pair), np.nan, pair)


def _numbers(values: Floats, digits: int = 7) -> Sequence[float | None]:
    """Make numbers JSON: null for those that are not finite, and no more digits than a screen can show."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]
