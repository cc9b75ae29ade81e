"""Telling pages that a run has grown: server-sent events from one look per second, however many watch."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from headway.core.runs import RunPaths
from headway.monitor.dashboard.catalog import Catalog

INTERVAL = 1.0
Marks = dict[str, tuple[float, ...]]


class Watcher:
    """Looks at the files of all runs while somebody listens, and tells every listener which runs changed."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._listeners: set[asyncio.Queue[list[str]]] = set()
        self._task: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()

    async def changes(self) -> AsyncGenerator[list[str], None]:
        """Names of runs that changed since the last time; an empty list now and then shows that the link is alive.

        The first answer is an empty one: whatever changes after it will be told.
        """
        queue: asyncio.Queue[list[str]] = asyncio.Queue()
        self._listeners.add(queue)
        if self._task is None or self._task.done():
            self._looked.clear()
            self._task = asyncio.create_task(self._watch())
        try:
            await self._looked.wait()
            yield []
            while True:
                try:
                    yield await asyncio.wait_for(queue.get(), 15.0)
                except TimeoutError:
                    yield []
        finally:
            self._listeners.discard(queue)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        before = await asyncio.to_thread(self._marks)
        self._looked.set()
        while self._listeners:
            await asyncio.sleep(INTERVAL)
            now = await asyncio.to_thread(self._marks)
            changed = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
            before = now
            if changed:
                for queue in self._listeners:
                    queue.put_nowait(changed)

    def _marks(self) -> Marks:
        return {name: _mark(paths) for name, paths in self._catalog.found().items()}


def _mark(paths: RunPaths) -> tuple[float, ...]:
    marks: list[float] = []
    for place in (paths.metrics, paths.rollouts, paths.logs, paths.evaluations):
        with suppress(OSError):
            marks.append(place.stat().st_mtime)
        if place in (paths.metrics, paths.logs):
            with suppress(OSError):
                marks += sorted(entry.stat().st_size for entry in place.iterdir())
    return tuple(marks)
