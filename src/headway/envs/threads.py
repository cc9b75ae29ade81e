"""Threads for code that may never return: reused when it does, left behind when it does not."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")

MAX_ABANDONED = 32
"""Threads that may hang at a time; then calls are refused, since each hung one may burn a core."""

_Work = tuple[Callable[[], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class _Thread:
    """A daemon thread that runs one piece of work at a time and then waits for the next."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="headway-tool").start()

    def _serve(self) -> None:
        while True:
            function, future, loop = self.inbox.get()
            try:
                value, error = function(), None
            except BaseException as raised:
                value, error = None, raised
            try:
                loop.call_soon_threadsafe(self._deliver, future, value, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    def _deliver(self, future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
        _abandoned.discard(self)
        _idle.append(self)
        if not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(_carried(error))


def _carried(error: BaseException) -> Exception:
    """Futures refuse StopIteration, and a SystemExit of a tool must not end the worker."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


_idle: list[_Thread] = []
_abandoned: set[_Thread] = set()


def abandoned() -> int:
    """Count the threads that hang in work that nobody waits for any more."""
    return len(_abandoned)


async def call_in_thread(function: Callable[[], Value], timeout: float | None = None) -> Value:
    """`function()` outside the event loop. Raises TimeoutError after `timeout` seconds, and leaves it behind."""
    if len(_abandoned) >= MAX_ABANDONED:
        raise RuntimeError(f"{len(_abandoned)} earlier calls hang in this worker; no more are started")
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Value] = loop.create_future()
    thread = _idle.pop() if _idle else _Thread()
    thread.inbox.put((function, future, loop))
    try:
        async with asyncio.timeout(timeout):
            return await future
    except (TimeoutError, asyncio.CancelledError):
        if thread not in _idle:
            _abandoned.add(thread)
        raise
