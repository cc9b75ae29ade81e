"""The interface of back ends: machinery that makes sandboxes of one kind."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import ClassVar, Generic, TypeVar

from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import Limits, Sandbox, SandboxError, Snapshot

T = TypeVar("T")
SomeSandbox = TypeVar("SomeSandbox", bound=Sandbox)


class Backend(ABC):
    """Makes sandboxes. One per worker; `close` ends all that it made."""

    name: ClassVar[str]
    isolates: ClassVar[bool] = True
    """False for `process`, which only those get who ask for it by name."""

    takes: ClassVar[str] = ""
    """What must follow the kind's name and a colon, in words; it is the argument of the constructor."""

    @classmethod
    @abstractmethod
    def check(cls) -> None:
        """Raise SandboxUnavailableError, with what to install, where this machine can't run it."""

    @abstractmethod
    async def create(
        self, recipe: Recipe | None = None, limits: Limits | None = None, snapshot: Snapshot | None = None
    ) -> Sandbox:
        """Start a sandbox. Its work folder is what the recipe prepares, or what the snapshot holds."""

    @abstractmethod
    async def close(self) -> None:
        """End all sandboxes and remove what was prepared."""


class SnapshotBackend(Backend):
    """A back end whose sandboxes start empty: a recipe's folder is prepared once, kept as a snapshot and unpacked."""

    def __init__(self) -> None:
        self._prepared: Once[Snapshot] = Once()

    async def create(
        self, recipe: Recipe | None = None, limits: Limits | None = None, snapshot: Snapshot | None = None
    ) -> Sandbox:
        recipe, limits = recipe or Recipe(), limits or Limits()
        snapshot = snapshot or await self._beginning(recipe)
        return await beginning_with(await self._start(recipe, limits), snapshot)

    async def _beginning(self, recipe: Recipe) -> Snapshot | None:
        """Return the beginning of the work folder; None for an empty one."""
        if recipe.is_plain:
            return recipe.archive() if recipe.files else None
        return await self._prepared.get(recipe.key, lambda: self._prepare(recipe))

    async def _prepare(self, recipe: Recipe) -> Snapshot:
        async with await self._start(recipe, recipe.setup_limits) as box:
            await recipe.fill(box)
            return await box.snapshot()

    @abstractmethod
    async def _start(self, recipe: Recipe, limits: Limits) -> Sandbox:
        """Start a sandbox with an empty work folder."""


class Once(Generic[T]):
    """Things that are made once by key, whoever asks first; one whose making failed is made again."""

    def __init__(self) -> None:
        self._tasks: dict[object, asyncio.Future[T]] = {}

    async def get(self, key: object, make: Callable[[], Awaitable[T]]) -> T:
        if key not in self._tasks:
            self._tasks[key] = asyncio.ensure_future(make())
        try:
            return await asyncio.shield(self._tasks[key])
        except SandboxError:
            self._tasks.pop(key, None)
            raise

    def cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()


async def beginning_with(box: SomeSandbox, snapshot: Snapshot | None) -> SomeSandbox:
    """Unpack a snapshot into a sandbox that was just started; it is stopped where that fails."""
    if snapshot is not None:
        try:
            await box.restore(snapshot)
        except BaseException:
            await box.stop()
            raise
    return box
