"""Numbers that describe a reply: how long it is, how much it repeats itself, how much of the prompt is in it."""

from collections.abc import Callable

import numpy as np

from headway.monitor.audit.table import Floats, RolloutTable, Row

PIECE = 4
"""Characters of the pieces by which texts are compared. Shorter ones are common to any two texts."""


def measure(table: RolloutTable, of: Callable[[Row], float]) -> Floats:
    return np.array([of(row) for row in table.rows], dtype=np.float64)


def length(row: Row) -> float:
    """Characters of the reply."""
    return float(len(row.reply))


def repetition(row: Row) -> float:
    """The share of a reply's pieces that were there before; 0 for one too short to repeat anything."""
    pieces = _pieces(row.reply)
    return 1.0 - len(set(pieces)) / len(pieces) if len(pieces) > PIECE else 0.0


def copied(row: Row) -> float:
    """The share of the prompt's pieces that the reply has, too."""
    asked = set(_pieces(row.prompt))
    return len(asked.intersection(_pieces(row.reply))) / len(asked) if asked else 0.0


def foreign(row: Row) -> float:
    """The share of the reply's letters that are not ASCII, less that of the prompt's."""
    return max(0.0, _beyond_ascii(row.reply) - _beyond_ascii(row.prompt))


def _pieces(text: str) -> list[str]:
    return [text[i : i + PIECE] for i in range(len(text) - PIECE + 1)]


def _beyond_ascii(text: str) -> float:
    letters = [char for char in text if char.isalpha()]
    return sum(not char.isascii() for char in letters) / len(letters) if letters else 0.0
