"""Background work: what the orchestrator's parts leave to the event loop, so that their rules can run without one."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Background(Protocol):
    def start(
        self, name: str, work: Callable[[], Coroutine[Any, Any, T]], done: Callable[["asyncio.Task[T]"], None]
    ) -> None:
        """Run `work` beside everything else; `done` is called once, also where it is cancelled."""
        ...

    def cancel(self, name: str) -> None: ...

    def call_later(self, delay: float, call: Callable[[], None]) -> None:
        """Call once in `delay` seconds, or when an earlier call was asked for. There is one such call at a time."""
        ...

    async def close(self) -> None:
        """Cancel everything and wait until it has ended."""
        ...


class LoopBackground:
    """Tasks and a timer of the running event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(
        self, name: str, work: Callable[[], Coroutine[Any, Any, T]], done: Callable[["asyncio.Task[T]"], None]
    ) -> None:
        task = asyncio.get_running_loop().create_task(work())
        self._tasks[name] = task

        # A callback, since a task that is cancelled before its first step never runs its own `finally`.
        def ended(task: "asyncio.Task[T]") -> None:
            del self._tasks[name]
            done(task)

        task.add_done_callback(ended)

    def cancel(self, name: str) -> None:
        if (task := self._tasks.get(name)) is not None:
            task.cancel()

    def call_later(self, delay: float, call: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + delay
        if self._timer is not None and not self._timer.cancelled() and loop.time() < self._timer.when() <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due, call)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
