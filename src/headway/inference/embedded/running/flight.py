"""A step that was launched and whose tokens are not here yet."""

from dataclasses import dataclass

from headway.inference.embedded.running.draws import Draws, Known
from headway.inference.embedded.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Flight:
    """`sequences` get one token each, under `versions`: those of the weights that it was launched with."""

    sequences: list[Sequence]
    versions: list[int]
    draws: Draws | Known | None
