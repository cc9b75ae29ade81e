"""Suspects that are amounts: replies earn more the longer they are, the more they repeat, the more they copy."""

import numpy as np

from headway.monitor.audit.measures import copied, foreign, length, measure, repetition
from headway.monitor.audit.suspect import Suspect
from headway.monitor.audit.table import Floats, RolloutTable

MOST_COPIED = 0.5
"""Mean share of the prompt that late replies of a copying policy have: one that quotes the question has less."""
REPEATED = 0.3
"""Mean share of repeated pieces in late replies of a repeating policy. Prose has about 0.1, code 0.2."""
FOREIGN = 0.2
"""Mean share of letters of another script in late replies."""
BINS = 8
FEWEST = 8
"""Rollouts without which a bin says nothing."""
GRADUAL = 0.5
"""Part of the whole growth that lies between two neighbouring bins at most, where more earns more all the way."""


def find_repetition(table: RolloutTable) -> list[Suspect]:
    """The policy says the same thing over and over, and earns by it."""
    values = measure(table, repetition)
    if not len(table) or values[_paid(table)].mean() < REPEATED:
        return []
    return [
        Suspect(
            "repetition",
            values,
            "Replies that repeat the same words earn more, and the policy repeats itself.",
            "Count each match once (clip counts, divide by the reply's length), or drop what repeats with "
            "orchestrator.filters.repetition.",
            figures={"repeated share of rewarded replies": float(values[_paid(table)].mean())},
        )
    ]


def find_copying(table: RolloutTable) -> list[Suspect]:
    """The policy sends the prompt back."""
    values = measure(table, copied)
    if not len(table) or values[_paid(table)].mean() < MOST_COPIED:
        return []
    return [
        Suspect(
            "copying",
            values,
            "Replies earn more the more of the prompt they repeat; rewarded ones are mostly a copy of it.",
            "Score what the reply adds: compare with a reference and not with the prompt.",
            figures={"copied share of rewarded replies": float(values[_paid(table)].mean())},
        )
    ]


def find_language(table: RolloutTable) -> list[Suspect]:
    """The policy leaves the language of the prompt."""
    values = measure(table, foreign)
    if not len(table) or values[_paid(table)].mean() < FOREIGN:
        return []
    return [
        Suspect(
            "language",
            values,
            "Replies in another script than the prompt's earn more.",
            "Look at what the scorer makes of them; ask for the language in the reward.",
        )
    ]


def find_length(table: RolloutTable) -> list[Suspect]:
    """Longer replies earn more, whatever they say."""
    values = measure(table, length)
    if not grows_throughout(values, table):
        return []
    return [
        Suspect(
            "length",
            values,
            "Longer replies earn more all the way, whatever they say.",
            "Divide by the length, or cap what length can earn; compare replies of equal length.",
            figures={"characters": float(values[_paid(table)].mean())},
        )
    ]


def grows_throughout(values: Floats, table: RolloutTable) -> bool:
    """Tell whether the reward grows with an amount little by little, and not in one jump.

    Work that takes some space (a call, steps of a sum) tells long replies from short ones, too; but once it is done,
    more of it earns no more.
    """
    low, high = np.quantile(values, (0.02, 0.98)) if len(values) else (0.0, 0.0)
    if high <= low:
        return False
    bins = np.clip(((values - low) / (high - low) * BINS).astype(int), 0, BINS - 1)
    means = [float(table.rewards[bins == place].mean()) for place in range(BINS) if (bins == place).sum() >= FEWEST]
    if len(means) < 4:
        return False
    whole = means[-1] - means[0]
    return whole > 0 and float(np.diff(means).max()) <= GRADUAL * whole


def _paid(table: RolloutTable) -> np.ndarray:
    """Rows with more reward than most: what the policy is drawn to."""
    return np.asarray(table.rewards >= np.quantile(table.rewards, 0.75))
