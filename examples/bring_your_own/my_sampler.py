"""A sampler of tasks of one's own: a generator that sees the tasks themselves and yields indices forever."""

import random
from collections.abc import Iterator, Sequence

from headway.core.episodes import Task


def short_first(tasks: Sequence[Task], seed: int, half: int = 4) -> Iterator[int]:
    """Draw tasks with less data more often: the chance halves every `half` characters."""
    chance = random.Random(seed)
    weights = [0.5 ** (len(str(task.data)) / half) for task in tasks]
    while True:
        yield chance.choices(range(len(tasks)), weights)[0]
