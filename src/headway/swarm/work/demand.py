"""Demand for work: how many more orders the next batches of a run can use."""

import time
from collections.abc import Callable

from headway.swarm.trust.standing import Trust

PATIENCE_SECONDS = 120.0
"""Time after which the answer to an order is no longer expected: others are asked for that work."""


class Demand:
    """Counts the groups that are expected of workers, against the `most` that the next batches can use."""

    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._expected: dict[str, float] = {}

    def wanted(self, trust: Trust, waiting: int) -> bool:
        """Tell if more orders should be given, where `waiting` verified groups are not used yet."""
        now = self._clock()
        # Nothing is expected of keys that never delivered: anyone can make many, take orders and leave.
        opened = {id for of in trust.workers.values() if of.accepted for id in of.open}
        self._expected = {id: self._expected.get(id, now) for id in opened}
        expected = sum(now - since < PATIENCE_SECONDS for since in self._expected.values())
        return expected + waiting < self._most
