"""One supervised process: started with its own log, watched, restarted, and ended with all processes it started."""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from headway.base.errors import CRASHED, MESSAGE_PREFIX, STOPPED, DamagedError, PermanentError, UsageError
from headway.base.processes import die_with_parent_environment
from headway.monitor.logs import SUPERVISED, next_log


@dataclass(frozen=True)
class ProcessSpec:
    """A command to start. If `ends`, exiting with 0 means that its work is done; others serve until stopped. `below` is
    a process that it uses while that runs, and whose environment it gets for that: where that ends, this one is killed,
    since it could hang. One that dies early starts again without."""

    name: str
    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    ends: bool = False
    below: "ManagedProcess | None" = None


@dataclass
class RestartBudget:
    """Allows `limit` deaths in a row, with delays that double from `first_delay` to `longest_delay`.

    A death counts as "in a row" unless the process had been up for `healthy_after` seconds or the run had made
    progress (a new step) since the death before.
    """

    limit: int = 5
    first_delay: float = 0.25
    longest_delay: float = 30.0
    healthy_after: float = 60.0
    deaths: int = 0
    _last_progress: int = field(default=-1, repr=False)

    def died(self, uptime: float, progress: int) -> float | None:
        """Return the seconds to wait before the next start, or None when there should be none."""
        if uptime >= self.healthy_after or progress > self._last_progress:
            self.deaths = 0
        self._last_progress = max(progress, self._last_progress)
        self.deaths += 1
        if self.deaths > self.limit:
            return None
        return min(self.longest_delay, self.first_delay * 2.0 ** (self.deaths - 1))


class ManagedProcess:
    """Keeps one `ProcessSpec` alive within its restart budget. Every attempt writes a log of its own."""

    def __init__(self, spec: ProcessSpec, logs: Path) -> None:
        self.spec = spec
        self.logs = logs
        self.budget = RestartBudget()
        self.log = logs / f"{spec.name}.log"
        self.finished = False
        self._child: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._start_again_at: float | None = None
        self._last_crash: tuple[str, int] | None = None
        self._below: ManagedProcess | None = None
        self._alone = False

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    @property
    def runs(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        self.log = next_log(self.logs, self.spec.name)
        self._start_again_at = None
        self._started_at = time.monotonic()
        below = self.spec.below
        self._below = below if below and below.runs and not self._alone else None
        shared = self._below.spec.environment if self._below else {}
        environment = {**os.environ, **self.spec.environment, **shared, **die_with_parent_environment()}
        environment[SUPERVISED] = str(self.log)
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self.spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def watch(self, progress: int) -> str | None:
        """Restart the process if it died and its delay is over. Returns a line for the user when something happened.

        Raises UsageError when the process refused its settings, PermanentError when it says that it cannot go on, and
        CrashLoopError when it keeps dying.
        """
        if self._start_again_at is not None and time.monotonic() >= self._start_again_at:
            self.start()
            return f"{self.spec.name} restarted, log: {self.log}"
        if self._child is not None and self._below and not self._below.runs:
            self._child.kill()
            self._child.wait()
        if self._child is None or (code := self._child.poll()) is None:
            return None
        self._kill_group()
        if code == 0 and self.spec.ends:
            self.finished = True
            return f"{self.spec.name} finished"
        if code == UsageError.exit_code:
            raise UsageError(f"{self.spec.name} refused to start: {self.reason()}")
        for permanent in (PermanentError, DamagedError):
            if code == permanent.exit_code:
                raise permanent(f"{self.spec.name} stopped the run: {self.reason()}")
        uptime = time.monotonic() - self._started_at
        self._alone = self._alone or uptime < self.budget.healthy_after
        delay = self.budget.died(uptime, progress)
        if delay is None or (code == CRASHED and self._crashed_alike(progress)):
            raise CrashLoopError(self)
        self._start_again_at = time.monotonic() + delay
        return f"{self.spec.name} died ({_cause(code)}); starting again in {delay:.1f} s"

    def terminate(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
        self._start_again_at = None

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`. Returns whether it ended; then all that it had started has ended, too."""
        if self._child is None:
            return True
        try:
            self._child.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        self._kill_group()
        return True

    def kill(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
        self.wait(10.0)
        self._start_again_at = None

    def reason(self) -> str:
        """Return what the process said last, as its command line printed it."""
        lines = self.log_tail(40).splitlines()
        said: list[str] = []
        for line in reversed(lines):
            if not line.startswith(MESSAGE_PREFIX):
                break
            said.insert(0, line.removeprefix(MESSAGE_PREFIX))
        return "\n".join(said) or lines[-1]

    def _crashed_alike(self, progress: int) -> bool:
        """True if it crashed in the same way before, and the run made no step since: it will crash again."""
        before, self._last_crash = self._last_crash, (self.reason(), progress)
        return self._last_crash == before

    def log_tail(self, lines: int = 1) -> str:
        """Return the last `lines` of the current log, without empty ones."""
        try:
            text = self.log.read_bytes()[-20_000:].decode(errors="replace")
        except OSError:
            return "no log was written"
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:]) or "its log is empty"

    def _kill_group(self) -> None:
        """Kill what is left of the process group, and forget the child."""
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child = None


class CrashLoopError(Exception):
    """A process died too often in a row."""

    def __init__(self, process: ManagedProcess) -> None:
        super().__init__(process.spec.name)
        self.process = process


def _cause(code: int | None) -> str:
    if code == STOPPED:
        return "someone else's signal asked it to stop"
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
