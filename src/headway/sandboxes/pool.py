"""A pool of sandboxes: bounded, fair between environments, with some started ahead of their use."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from headway.sandboxes.backend import Backend
from headway.sandboxes.gate import FairGate
from headway.sandboxes.kinds import backend_class, make_backend
from headway.sandboxes.meters import meters
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import Limits, Sandbox, SandboxError, Snapshot

logger = logging.getLogger(__name__)

_Key = tuple[object, Limits]


class SandboxPool:
    """Lends sandboxes, at most `most` at a time; one is used once and stopped when it is given back.

    Up to `warm` are kept started for the recipes that were asked for last. A recipe's folder is prepared once.
    """

    def __init__(self, kind: str = "auto", *, most: int = 32, warm: int = 0) -> None:
        """Raises SandboxUnavailableError, with what to install, where this machine can't run `kind`."""
        self._kind = kind
        if not backend_class(kind).isolates:
            logger.warning('sandboxes of kind "%s" isolate nothing: what runs in them can do what you can', kind)
        self._backend: Backend | None = None
        self._gate = FairGate(most)
        self._warm_limit = warm
        self._warm: dict[_Key, list[Sandbox]] = {}
        self._refilling: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        limits: Limits | None = None,
        *,
        snapshot: Snapshot | None = None,
        owner: str = "",
    ) -> AsyncIterator[Sandbox]:
        """Lend a sandbox that begins with the recipe's folder, or with a snapshot; `owner` is who shares the pool."""
        recipe, limits = recipe or Recipe(), limits or Limits()
        gauge = meters()
        waiting = gauge.phase("wait")
        with waiting:
            place = self._gate.place(owner)
            await place.__aenter__()
        try:
            with gauge.phase("start"):
                box = await self._take(recipe, limits, snapshot)
            gauge.count("starts")
            try:
                yield box
            finally:
                with gauge.phase("stop"):
                    await _to_the_end(box.stop())
        finally:
            await place.__aexit__(None, None, None)

    async def close(self) -> None:
        """Stop everything, also what is still lent."""
        for task in self._refilling:
            task.cancel()
        if self._refilling:
            await asyncio.wait(self._refilling)
        self._warm.clear()
        if self._backend is not None:
            await self._backend.close()
            self._backend = None

    async def _take(self, recipe: Recipe, limits: Limits, snapshot: Snapshot | None) -> Sandbox:
        if self._backend is None:
            self._backend = make_backend(self._kind)
        if snapshot is None and self._warm_limit:
            key: _Key = (recipe.key, limits)
            ready = self._warm.pop(key, [])
            self._warm[key] = ready  # last in the order: asked for last
            self._refill(recipe, limits, key)
            if ready:
                return ready.pop()
        return await self._backend.create(recipe, limits, snapshot)

    def _refill(self, recipe: Recipe, limits: Limits, key: _Key) -> None:
        if not self._refilling:
            task = asyncio.get_running_loop().create_task(self._start_ahead(recipe, limits, key))
            self._refilling.add(task)
            task.add_done_callback(self._refilling.discard)

    async def _start_ahead(self, recipe: Recipe, limits: Limits, key: _Key) -> None:
        """Start sandboxes for `key` up to the bound, at the cost of those whose recipe was not asked for longest."""
        assert self._backend is not None
        try:
            while len(self._warm.get(key, ())) < self._warm_limit:
                while sum(map(len, self._warm.values())) >= self._warm_limit:
                    oldest = next(k for k, boxes in self._warm.items() if boxes)
                    if oldest == key:
                        return
                    await self._warm[oldest].pop().stop()
                self._warm.setdefault(key, []).append(await self._backend.create(recipe, limits))
        except SandboxError as error:
            logger.warning("no sandbox could be started ahead: %s", error)


async def _to_the_end(work: Awaitable[None]) -> None:
    """Await `work` even while this task is cancelled: what was lent must be stopped."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
