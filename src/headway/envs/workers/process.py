"""One worker process as the pool sees it: started, spoken to, watched, ended."""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from headway.base.errors import HeadwayError, PermanentError
from headway.core.episodes import Episode
from headway.envs.workers import frames
from headway.envs.workers.keeper import MARK, end_marked, owner_mark
from headway.envs.workers.output import OutputLog
from headway.envs.workers.variables import worker_variables

logger = logging.getLogger(__name__)

STOP_SECONDS = 15.0
_numbers = itertools.count()


class Owner(Protocol):
    """The pool, as a worker process reports to it."""

    def replied(self, number: int, reply: bytes) -> None: ...

    def finished(self, worker: "WorkerProcess", number: int, episode: Episode) -> None: ...

    def lost(self, worker: "WorkerProcess", reason: str) -> None: ...


class WorkerProcess:
    """A child process that speaks frames over a socket pair, in a session of its own with whatever it starts."""

    def __init__(self, owner: Owner, name: str, pass_env: Sequence[str] = ()) -> None:
        self._owner = owner
        self._mark = f"{owner_mark()}.{next(_numbers)}"
        self._pass_env = pass_env
        self._name = name
        self._connection = frames.FrameConnection(self._received, self._disconnected)
        self._ready: asyncio.Future[frames.Ready] = asyncio.get_running_loop().create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._serving = False
        self._gone = False
        self._reason: str | None = None
        self.running: set[int] = set()
        """Numbers of the episodes that it has."""
        self.retiring = False
        self._pinged: float | None = None
        self.idle_since = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else -1

    async def start(self, start: frames.Start, memory_gb: float | None, timeout: float) -> frames.Ready:
        """Returns what the worker reports when it serves. Raises HeadwayError, the process ended, where it can't."""
        try:
            await self._spawn(memory_gb)
            self._connection.send(start)
            async with asyncio.timeout(timeout):
                ready = await self._ready
            if self._gone:  # between its last word and ours
                raise self._died_early()
        except TimeoutError:
            await self.kill("start")
            raise HeadwayError(f'environment "{self._name}" did not start within {timeout:g} s') from None
        except BaseException:
            await self.kill("start")
            raise
        self._serving = True
        self.idle_since = time.monotonic()
        return ready

    def send(self, frame: frames.ToWorker) -> None:
        self._connection.send(frame)

    def ping(self, now: float) -> float:
        """Send a heartbeat unless one is unanswered; returns for how long the worker has not answered."""
        if self._pinged is None:
            self._pinged = now
            self._connection.send(frames.Ping())
        return now - self._pinged

    async def stop(self) -> None:
        """End in good order, or by force after STOP_SECONDS."""
        self._serving = False
        self._connection.send(frames.Stop())
        await self._reap()

    async def kill(self, reason: str) -> None:
        """End at once, with all processes of its session; `reason` is what its episodes are told."""
        self._reason = self._reason or reason
        self._signal()
        self._connection.close()
        await self._reap()

    def _signal(self) -> None:
        """Kill the process and all that it started. Until it is reaped, its id can't belong to another."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _spawn(self, memory_gb: float | None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = self._popen(theirs.fileno(), memory_gb)
        loop = asyncio.get_running_loop()
        assert self._process.stdout is not None
        await loop.connect_read_pipe(lambda: OutputLog(f"{self._name}[{self.pid}]"), self._process.stdout)
        await loop.create_connection(lambda: self._connection, sock=ours)

    def _popen(self, handle: int, memory_gb: float | None) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "headway.envs.workers.worker", str(handle)]
        if memory_gb is not None:
            command.append(str(int(memory_gb * 2**30)))
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[handle],
            start_new_session=True,
            env={
                **worker_variables(self._pass_env),
                "TOKENIZERS_PARALLELISM": "false",
                "PYTHONUNBUFFERED": "1",
                MARK: self._mark,
            },
        )

    async def _reap(self) -> None:
        process = self._process
        deadline = time.monotonic() + STOP_SECONDS
        while process is not None and process.poll() is None:
            if time.monotonic() > deadline:
                self._signal()
            await asyncio.sleep(0.02)
        if process is not None:
            # Also what left the worker's session, or outlived a worker that ended in good order.
            await asyncio.to_thread(end_marked, self._mark)

    def _received(self, data: bytes) -> None:
        self._pinged = None
        match frames.from_worker.decode(data):
            case frames.Replied(number=number, reply=reply):
                self._owner.replied(number, reply)
            case frames.Done(number=number, episode=episode):
                self.running.discard(number)
                self.idle_since = time.monotonic()
                self._owner.finished(self, number, episode)
            case frames.Ready() as ready if not self._ready.done():
                self._ready.set_result(ready)
            case frames.Failed(message=message) if not self._ready.done():
                # The environment itself failed, as it would for another worker.
                self._ready.set_exception(PermanentError(message))
            case frames.Retiring(reason=reason):
                logger.warning("environment %s: worker %d will be replaced: %s", self._name, self.pid, reason)
                self.retiring = True

    def _disconnected(self) -> None:
        """The worker closes its end as the last thing it does, so what is left of it may be killed."""
        self._gone = True
        self._signal()
        if not self._ready.done():
            self._ready.set_exception(self._died_early())
            self._ready.exception()  # whoever waited may have been cancelled
        if self._serving:
            self._serving = False
            self._reaping = asyncio.get_running_loop().create_task(self._reap())
            self._owner.lost(self, self._reason or "the worker died")

    def _died_early(self) -> HeadwayError:
        return HeadwayError(f'environment "{self._name}": its worker died while starting; see its output in the log')
