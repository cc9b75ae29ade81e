"""Backpressure: the engine's thread waits for an event loop that is late, because tokens that were sampled and not sent
are lost if the process dies."""

import threading
import time
from collections import deque

_LATE_SECONDS = 0.1
"""The engine may be ahead by so long: a loop that is busy for a moment costs it nothing."""
_MOST_SECONDS = 2.0
"""It waits no longer for one delivery: the loop may be waiting for the engine."""


class Backpressure:
    """Counts deliveries on their way from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._sent: deque[float] = deque()
        self._changed = threading.Condition()

    def send(self) -> None:
        """Begin a delivery, as soon as the one before the last has arrived or is young. Call it in the engine's
        thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_late(), _MOST_SECONDS)
            self._sent.append(time.monotonic())

    def arrived(self) -> None:
        """End the oldest delivery. Call it in the event loop, for each one."""
        with self._changed:
            self._sent.popleft()
            self._changed.notify()

    def _is_late(self) -> bool:
        return len(self._sent) > 1 and time.monotonic() - self._sent[0] > _LATE_SECONDS
