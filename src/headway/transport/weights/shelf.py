"""A shelf of versions that a rank holds for engines to fetch: the newest two, and what is being fetched."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headway.transport.weights.arena import SLAB_BYTES, Allocate, Arena
from headway.transport.weights.layout import Layout

_KEPT = 2


@dataclass(slots=True)
class Held:
    version: int
    layout: Layout
    arena: Arena
    readers: int = 0


class Shelf:
    """Thread-safe. A new version never waits for readers of an old one: it then gets an arena of its own."""

    def __init__(self, allocate: Allocate, slab_bytes: int = SLAB_BYTES) -> None:
        self._allocate, self._slab_bytes = allocate, slab_bytes
        self._lock = threading.Lock()
        self._held: list[Held] = []

    def spare(self) -> Arena:
        """An arena to fill: that of the oldest version where it is free and no longer kept, or a new one."""
        with self._lock:
            for held in self._held[: -_KEPT + 1]:
                if not held.readers:
                    self._held.remove(held)
                    return held.arena
        return Arena(self._allocate, self._slab_bytes)

    def put(self, version: int, layout: Layout, arena: Arena) -> None:
        """Hold a filled arena as the newest version."""
        with self._lock:
            self._held = [held for held in self._held if held.version < version]
            self._held.append(Held(version, layout, arena))

    @property
    def offered(self) -> list[int]:
        """Versions that may be asked for."""
        with self._lock:
            return [held.version for held in self._held[-_KEPT:]]

    @contextmanager
    def borrow(self, version: int) -> Iterator[Held | None]:
        """The held version, which stays unchanged meanwhile; None where there is none."""
        with self._lock:
            held = next((h for h in self._held if h.version == version), None)
            if held is not None:
                held.readers += 1
        try:
            yield held
        finally:
            with self._lock:
                if held is not None:
                    held.readers -= 1

    @property
    def newest(self) -> Held | None:
        with self._lock:
            return self._held[-1] if self._held else None

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
