"""An asyncio loop whose clock jumps to the next timer instead of waiting: hours pass in milliseconds, in one order."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _JumpingSelector(selectors.BaseSelector):
    """Never waits: when nothing is ready, the time until the next timer has simply passed."""

    def __init__(self) -> None:
        self.now = 0.0
        self._inner = selectors.SelectSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: nothing is scheduled and nothing is ready")
        self.now += max(timeout, 0.0)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def get_map(self) -> Any:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers fire in order, without waiting. There is no input or output. Errors in callbacks end up in `failures`."""

    def __init__(self) -> None:
        self.virtual = _JumpingSelector()
        super().__init__(self.virtual)
        self.failures: list[str] = []
        self.set_exception_handler(self._remember)

    def time(self) -> float:
        return self.virtual.now

    def _remember(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """Like asyncio.run, on a loop of its own whose time is simulated. Errors in callbacks fail it."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(main)
        if loop.failures:
            raise RuntimeError(loop.failures[0])
        return result
    finally:
        asyncio.set_event_loop(None)
        loop.close()
