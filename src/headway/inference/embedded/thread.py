"""The thread that steps an engine, and how others get a word in between two steps."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from headway.inference.embedded.engine import EmbeddedEngine, Event
from headway.inference.engine import Chunk, FailedError, Result

logger = logging.getLogger("headway.inference")
Answer = TypeVar("Answer")
Item = Chunk | Result | Exception
"""What a request is sent: pieces of it, its end, or why there is none."""

_FAILURES_IN_A_ROW = 3


class EngineThread:
    """Owns the engine: everything that touches it is posted here and runs between two steps.

    `send` gets what a step had for requests, in one call from this thread. `failure` says why the engine is
    given up, None while it works.
    """

    def __init__(self, engine: EmbeddedEngine, send: Callable[[list[tuple[str, Item]]], None]) -> None:
        self.paused = False
        self.failure: str | None = None
        self._engine = engine
        self._send = send
        self._inbox: deque[Callable[[], None]] = deque()
        self._when_drained: list[Callable[[], None]] = []
        self._wake = threading.Event()
        self._closing = False
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Abort what is in flight and wait for the end."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def post(self, work: Callable[[], None]) -> None:
        """Have `work` done soon."""
        self._inbox.append(work)
        self._wake.set()

    async def ask(self, work: Callable[[], Answer]) -> Answer:
        """Have `work` done, with no step in the air, and get what it returns or raises."""
        future: Future[Answer] = Future()

        def settled() -> None:
            self._settle()
            _complete(future, work)

        self.post(settled)
        return await asyncio.wrap_future(future)

    async def ask_when_drained(self, work: Callable[[], None]) -> None:
        """Have `work` done once all that had started has ended; nothing new starts before it."""
        future: Future[None] = Future()

        def hold() -> None:
            self._engine.scheduler.hold = True
            self._when_drained.append(lambda: _complete(future, work))

        self.post(hold)
        await asyncio.wrap_future(future)

    def deliver(self, events: list[Event]) -> None:
        """Send what the engine had for requests. Called in this thread."""
        if events:
            self._send([(job.request_id, item) for job, item in events])

    def forgive(self) -> None:
        """Try again in spite of failures: what caused them was replaced."""
        self._failures, self.failure = 0, None

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception as error:
                self._recover(error)
        self.deliver(self._engine.abort_all())

    def _turn(self) -> None:
        """Everything that was asked for, then one step; waits where there is nothing to do."""
        self._wake.clear()
        while self._inbox:
            self._inbox.popleft()()
        if self._when_drained and self._engine.drained:
            self._engine.scheduler.hold = False
            self._settle()
            while self._when_drained:
                self._when_drained.pop(0)()
        if self.paused or self._engine.idle:
            self._wake.wait()
            return
        self.deliver(self._engine.step())
        self._failures = 0

    def _settle(self) -> None:
        try:
            self.deliver(self._engine.settle())
        except Exception as error:
            self._recover(error)

    def _recover(self, error: Exception) -> None:
        """A step failed: its requests fail, the engine goes on; several in a row mean that it can't."""
        logger.exception("a step failed", exc_info=error)
        self._failures += 1
        if self._failures >= _FAILURES_IN_A_ROW:
            self.failure = f"{_FAILURES_IN_A_ROW} steps in a row failed; the last: {error}"
        failed = FailedError(f"the engine failed: {type(error).__name__}: {error}")
        if jobs := self._engine.reset():
            self._send([(job.request_id, failed) for job in jobs])


def _complete(future: "Future[Answer]", work: Callable[[], Answer]) -> None:
    """Do the work, unless who asked for it is gone."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
