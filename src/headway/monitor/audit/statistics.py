"""Statistics of the audit: how strongly something about a reply goes with its reward, and how sure that is."""

from dataclasses import dataclass

import numpy as np

from headway.monitor.audit.table import Floats, Marks, RolloutTable

CAUTION = 4.0
"""Standard errors by which a figure is moved towards "nothing to see" before it is compared with a threshold. Chance
goes beyond 4 of them once in 30,000 times: a report that tries some hundred patterns stays silent on noise."""


@dataclass(frozen=True)
class Association:
    """`correlation` within groups, and what of it is `sure` at the given number of rollouts (0 where nothing is)."""

    correlation: float = 0.0
    sure: float = 0.0


def within_groups(values: Floats, table: RolloutTable) -> Floats:
    """Subtract each group's mean: what remains is not due to a task that is easy, or to a policy that has changed."""
    sums = np.bincount(table.groups, weights=values)
    counts = np.bincount(table.groups)
    centered: Floats = values - (sums / np.maximum(counts, 1))[table.groups]
    return centered


def associate(values: Floats, table: RolloutTable, given: list[Floats] | None = None) -> Association:
    """Correlate `values` with the reward within groups, beyond what the columns `given` explain already.

    The certain part is the near end of Fisher's interval, whose degrees of freedom are those left by the groups' means.
    """
    x, y = within_groups(values.astype(np.float64), table), within_groups(table.rewards, table)
    for column in given or []:
        other = within_groups(column.astype(np.float64), table)
        if norm := float(other @ other):
            x, y = x - other * float(other @ x) / norm, y - other * float(other @ y) / norm
    free = len(x) - (int(table.groups.max()) + 1 if len(x) else 0) - len(given or []) - 3
    scale = float(np.sqrt((x @ x) * (y @ y)))
    # What is left of a column that others explain is rounding error, and correlates with anything.
    if free < 8 or scale < 1e-9 * max(1.0, len(x)):
        return Association()
    correlation = float(np.clip(x @ y / scale, -0.999999, 0.999999))
    margin = CAUTION / np.sqrt(free)
    near = np.tanh(max(0.0, abs(np.arctanh(correlation)) - margin))
    return Association(correlation, float(np.copysign(near, correlation)))


def correlation(one: Floats, other: Floats, table: RolloutTable) -> float:
    """Correlate two columns within groups."""
    x, y = within_groups(one.astype(np.float64), table), within_groups(other.astype(np.float64), table)
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale else 0.0


def rise(values: Floats, early: Marks, late: Marks) -> Association:
    """Say by how many of its standard deviations a column has risen from early rows to late ones."""
    before, after = values[early], values[late]
    if min(len(before), len(after)) < 8:
        return Association()
    spread = float(np.sqrt((before.var() + after.var()) / 2))
    if spread == 0.0:
        spread = 1e-9 if before.mean() != after.mean() else 1.0
    error = float(np.sqrt(before.var() / len(before) + after.var() / len(after)))
    difference = float(after.mean() - before.mean())
    sure = np.copysign(max(0.0, abs(difference) - CAUTION * error), difference)
    return Association(difference / spread, float(sure) / spread)
