"""Something about replies that may earn their reward by itself: a column of the table, and what to say about it."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headway.monitor.audit.finding import Cause, Finding, Level
from headway.monitor.audit.statistics import Association, associate, correlation
from headway.monitor.audit.table import Floats, RolloutTable

STRONG = 0.7
"""Correlation within groups from which on a reply's property explains half of the reward's variance: what remains for
the task itself is the smaller part."""
FEWEST_TASKS = 15
"""Tasks in which a property must occur: what earns in fewer may be their answer."""
LEFT = 0.25
"""Correlation that a property must keep beyond those found before it. One that loses it was their shadow: whoever adds
a keyword also writes longer replies."""
ALIKE = 0.8
"""Correlation from which on two properties are two names for one: a template, and a mark that it has."""


@dataclass(frozen=True)
class Suspect:
    """`values` per row: 1 and 0 where it is there or not, or an amount."""

    cause: Cause
    values: Floats
    text: str
    remedy: str
    level: Level = "problem"
    figures: dict[str, float] = field(default_factory=dict)


def convict(table: RolloutTable, suspects: list[Suspect], least: float = STRONG) -> list[Finding]:
    """Report suspects that explain the reward, in the order given, and none that an earlier one explains."""
    found: list[Finding] = []
    known: list[Floats] = []
    for suspect in suspects:
        if table.tasks(suspect.values > 0) < FEWEST_TASKS:
            continue
        alone = associate(suspect.values, table)
        if alone.sure < least or (known and associate(suspect.values, table, known).sure < LEFT):
            continue
        if any(correlation(suspect.values, other, table) >= ALIKE for other in known):
            continue
        known.append(suspect.values)
        found.append(_report(table, suspect, alone))
    return found


def _report(table: RolloutTable, suspect: Suspect, alone: Association) -> Finding:
    has = _with(suspect.values)
    figures = {
        "share of rollouts": float(has.mean()),
        "reward with": float(table.rewards[has].mean()) if has.any() else 0.0,
        "reward without": float(table.rewards[~has].mean()) if (~has).any() else 0.0,
        "correlation within groups": alone.correlation,
        "tasks": float(table.tasks(has)),
        "rollouts": float(len(table)),
    }
    return Finding(
        level=suspect.level,
        cause=suspect.cause,
        env=table.env,
        text=suspect.text,
        remedy=suspect.remedy,
        figures=figures | suspect.figures,
        examples=table.examples(has),
        strength=alone.sure,
    )


def _with(values: Floats) -> npt.NDArray[np.bool_]:
    """Choose the rows that have a property: those above the median of an amount, or at it where none is above."""
    if len(np.unique(values)) <= 2:
        return values > 0
    above = values > np.median(values)
    return above if above.any() else values >= np.median(values)
