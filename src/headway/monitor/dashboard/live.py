"""Server-sent events that tell browsers which runs have grown: one check per second, however many listen."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from headway.monitor.dashboard.catalog import Catalog, run_state

INTERVAL = 1.0


class Watcher:
    """Checks the files of all runs while there are listeners, and tells each which runs changed."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._listeners: set[asyncio.Queue[list[str]]] = set()
        self._task: asyncio.Task[None] | None = None
        self._started = asyncio.Event()

    async def changes(self) -> AsyncGenerator[list[str], None]:
        """Yield the names of runs that changed since the last time; sometimes an empty list, to keep the link alive.

        The first list is empty: whatever changes after it is reported.
        """
        queue: asyncio.Queue[list[str]] = asyncio.Queue()
        self._listeners.add(queue)
        if self._task is None or self._task.done():
            self._started.clear()
            self._task = asyncio.create_task(self._watch())
        try:
            await self._started.wait()
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
        before = await asyncio.to_thread(self._states)
        self._started.set()
        while self._listeners:
            await asyncio.sleep(INTERVAL)
            now = await asyncio.to_thread(self._states)
            changed = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
            before = now
            if changed:
                for queue in self._listeners:
                    queue.put_nowait(changed)

    def _states(self) -> dict[str, tuple[float, ...]]:
        return {name: run_state(paths) for name, paths in self._catalog.found().items()}
