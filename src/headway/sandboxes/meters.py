"""Counts of what sandboxes did for one episode: starts, seconds by phase, limits hit by kind."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Meters:
    """Sums by name: `starts`, `commands`, `seconds_<phase>`, `limit_<kind>`."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)

    def count(self, name: str, amount: float = 1.0) -> None:
        self.sums[name] += amount

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `seconds_<name>`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.count(f"seconds_{name}", time.perf_counter() - began)


_current: ContextVar[Meters | None] = ContextVar("headway_sandbox_meters", default=None)


def meters() -> Meters:
    """The meters of the episode that is running; sums that nobody reads where there is none."""
    return _current.get() or Meters()


@contextmanager
def measured() -> Iterator[Meters]:
    """Collect what sandboxes do in this block, and in the tasks that it starts."""
    made = Meters()
    token = _current.set(made)
    try:
        yield made
    finally:
        _current.reset(token)
