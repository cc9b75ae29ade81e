"""The thread that steps an engine, and runs what others post to it between two steps."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.requests import Event
from headway.inference.errors import FailedError
from headway.inference.outputs import Chunk, Result

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Item = Chunk | Result | Exception
"""An output of a request: a chunk, its result, or its error."""

_FAILURES_IN_A_ROW = 3


class EngineThread:
    """Owner of the engine: all work that touches it is posted here and runs between two steps.

    `send` receives all outputs of a step in one call from this thread. `failure` is the reason why the engine stopped
    serving, None while it works. `die` is called with it where only a new process can help.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        send: Callable[[list[tuple[str, Item]]], None],
        die: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.paused = False
        self.failure: str | None = None
        self._engine = engine
        self._send = send
        self._die = die
        self._inbox: deque[Callable[[], None]] = deque()
        self._when_drained: list[Callable[[], None]] = []
        self._wake = threading.Event()
        self._closing = False
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Abort all requests and join the thread."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` before the next step."""
        self._inbox.append(work)
        self._wake.set()

    async def call(self, work: Callable[[], Answer]) -> Answer:
        """Run `work` while no step is in flight; return its result or raise its error."""
        future: Future[Answer] = Future()

        def drained() -> None:
            self._drain()
            _complete(future, work)

        self.post(drained)
        return await asyncio.wrap_future(future)

    async def call_when_drained(self, work: Callable[[], None]) -> None:
        """Run `work` once all running requests have finished; no new request starts before."""
        future: Future[None] = Future()

        def hold() -> None:
            self._engine.scheduler.hold = True
            self._when_drained.append(lambda: _complete(future, work))

        self.post(hold)
        await asyncio.wrap_future(future)

    def deliver(self, events: list[Event]) -> None:
        """Send outputs to their requests. Called in this thread."""
        if events:
            self._send([(request.request_id, item) for request, item in events])

    def clear_failures(self) -> None:
        """Serve again after failures, since the weights were replaced."""
        self._failures, self.failure = 0, None

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception as error:
                self._recover(error)
        self.deliver(self._engine.abort_all())

    def _turn(self) -> None:
        """Run posted work, then one step; wait if there is nothing to do."""
        self._wake.clear()
        while self._inbox:
            self._inbox.popleft()()
        if self._when_drained and self._engine.drained:
            self._engine.scheduler.hold = False
            self._drain()
            while self._when_drained:
                self._when_drained.pop(0)()
        if self.paused or self._engine.idle:
            self._wake.wait()
            return
        self.deliver(self._engine.step())
        self._failures = 0

    def _drain(self) -> None:
        try:
            self.deliver(self._engine.drain())
        except Exception as error:
            self._recover(error)

    def _recover(self, error: Exception) -> None:
        """Fail all requests after a failed step and go on; give up after several failures in a row."""
        logger.exception("an engine step failed; its requests fail with it", exc_info=error)
        self._failures += 1
        if self._failures >= _FAILURES_IN_A_ROW:
            # Logits that are not finite come from the weights, which a new process would load again.
            dies = not isinstance(error, FloatingPointError)
            self._give_up(f"{_FAILURES_IN_A_ROW} steps in a row failed; the last: {_told(error)}", dies=dies)
        active = list(self._engine.active.values())
        try:
            self._engine.reset()
        except Exception as lasting:
            # As after an error of the device, which fails whatever comes after it.
            self._give_up(f"a step failed, and so does what clears it away: {_told(lasting)}", dies=True)
        failed = FailedError(f"the engine failed: {_told(error)}")
        if active:
            self._send([(request.request_id, failed) for request in active])

    def _give_up(self, reason: str, *, dies: bool) -> None:
        first, self.failure = self.failure is None, reason
        if first and dies:
            self._die(reason)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _complete(future: "Future[Answer]", work: Callable[[], Answer]) -> None:
    """Run the work unless its caller has gone."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
