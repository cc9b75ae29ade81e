"""The supervisor of a run: starts its processes, restarts what dies, stops everything cleanly."""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from headway.base.errors import HeadwayError
from headway.launch.process import CrashLoopError, ManagedProcess

logger = logging.getLogger(__name__)

STOP_GRACE = 60.0
"""Seconds that processes get to finish their step and write a checkpoint before they are killed."""


class Supervisor:
    """Starts processes and restarts those that die: crash-only, so no process is ever repaired.

    `progress` returns the run's newest step (it decides whether deaths are "in a row"); `on_tick` is called between
    two checks of the processes, for the console; `stop_asked` stops the run as Ctrl-C does. `failed` is the process
    that ended the run, where one did.
    """

    def __init__(
        self,
        processes: list[ManagedProcess],
        *,
        progress: Callable[[], int],
        on_tick: Callable[[], None] = lambda: None,
        on_event: Callable[[str], None] = logger.info,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.processes = processes
        self._progress = progress
        self._on_tick = on_tick
        self._on_event = on_event
        self._stop_asked = stop_asked
        self._signals = 0
        self.failed: ManagedProcess | None = None

    def run(self) -> bool:
        """Run until every process that ends has ended (forever, where none does), or until the user stops it.

        Returns whether all have ended. Raises HeadwayError when a process keeps dying. In every case none is left.
        """
        with self._listening():
            try:
                for process in self.processes:
                    process.start()
                while not self._signals and not self._done() and not self._stop_asked():
                    self._check()
                    self._on_tick()
                    time.sleep(0.1)
                finished = self._done()
                if not finished:
                    self._on_event("stopping: the step is finished first; Ctrl-C again kills at once")
            except CrashLoopError as error:
                raise HeadwayError(
                    _crash_report(error.process, resumable=any(p.spec.ends for p in self.processes))
                ) from None
            finally:
                self._stop()
        return finished

    def _done(self) -> bool:
        ending = [process for process in self.processes if process.spec.ends]
        return bool(ending) and all(process.finished for process in ending)

    def _check(self) -> None:
        progress = self._progress()
        for process in self.processes:
            try:
                event = process.watch(progress)
            except (HeadwayError, CrashLoopError):
                self.failed = process
                raise
            if event is not None:
                self._on_event(event)

    def _stop(self) -> None:
        """Stop those that have work to finish, then those that serve them; a second Ctrl-C cuts the wait short."""
        impatient_after = max(self._signals, 1)
        for ends in (True, False):
            stopping = [process for process in self.processes if process.spec.ends == ends]
            deadline = time.monotonic() + STOP_GRACE
            for process in stopping:
                process.terminate()
            for process in stopping:
                while not process.wait(0.1):
                    self._on_tick()
                    if time.monotonic() > deadline or self._signals > impatient_after:
                        self._on_event(f"{process.spec.name} did not stop in time; killed")
                        process.kill()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals += 1

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _crash_report(process: ManagedProcess, *, resumable: bool) -> str:
    stopped = "so the run was stopped. It can be continued with --resume." if resumable else "so all were stopped."
    died = f"{process.spec.name} died {process.budget.deaths} times in a row, {stopped}"
    return f"{died} Last lines of {process.log}:\n{process.log_tail(lines=12)}"
