"""A pool of worker processes for one environment: every episode comes back exactly once, whatever happens to them."""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.base.errors import HeadwayError
from headway.config.orchestrator import EnvSettings
from headway.core.episodes import Episode, EpisodeError, EpisodeRequest, ErrorKind, Task
from headway.envs.episodes import blank_episode
from headway.envs.packages.versions import CodeVersion
from headway.envs.reply_log import Recorded
from headway.envs.workers.frames import Cancel, Run, Start
from headway.envs.workers.kept_replies import KeptReplies
from headway.envs.workers.process import WorkerProcess

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""Time beyond an episode's limit after which its worker counts as stuck."""
START_ATTEMPTS = 3
"""Failed starts in a row after which waiting episodes are given up."""
MAX_RESUMES = 3
"""Workers that may die under one episode, each after more replies than the one before, until it counts as lost."""
FIRST_BACKOFF, LONGEST_BACKOFF = 0.2, 30.0


@dataclass(eq=False, slots=True)
class PendingEpisode:
    """An episode that was asked for and has not come back."""

    number: int
    request: EpisodeRequest
    future: "asyncio.Future[Episode]"
    recorded: Recorded | None = None
    worker: WorkerProcess | None = None
    deadline: float = float("inf")
    began: float | None = None
    resumes: int = 0
    resumed_at: int = 0
    """The turn after which it was resumed last."""


class EnvPool:
    """Workers of one environment, between `settings.workers.min` and `.max` of them as there is work.

    A worker that dies or whose event loop hangs for `heartbeat` seconds is replaced. Its episodes go on in another
    worker after the replies they have had, where the environment is resumable; all others come back as errors of kind
    "worker".
    """

    def __init__(
        self,
        settings: EnvSettings,
        *,
        model: Path,
        renderer: str = "auto",
        family: str | None = None,
        token: str | None = None,
        heartbeat: float = 30.0,
        start_timeout: float = 120.0,
        idle_seconds: float = 30.0,
    ) -> None:
        self.id, self.name = settings.id, settings.name or settings.id
        self.tasks: list[Task] = []
        self.code: list[CodeVersion] = []
        """What the environment was loaded from, by the first worker."""
        self.restarts = 0
        self.resumed = 0
        """Episodes that went on in another worker, counted each time."""
        self._settings = settings
        self._model, self._renderer, self._family, self._token = model, renderer, family, token
        self._heartbeat, self._start_timeout, self._idle_seconds = heartbeat, start_timeout, idle_seconds
        self._workers: list[WorkerProcess] = []
        self._pending: dict[int, PendingEpisode] = {}
        self._waiting: deque[PendingEpisode] = deque()
        self._kept = KeptReplies()
        self._resumable = False
        self._numbers = itertools.count()
        self._starting = 0
        self._failures = 0
        self._background: set[asyncio.Task[None]] = set()
        self._stopping: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def size(self) -> int:
        """Workers that serve now."""
        return len(self._workers)

    async def start(self) -> None:
        """Start the first workers and learn the tasks. Raises HeadwayError where the environment can't serve."""
        try:
            self.tasks = await self._add_worker(first=True)
            more = self._settings.workers.min - 1
            async with asyncio.TaskGroup() as group:
                for _ in range(more):
                    group.create_task(self._add_worker())
        except BaseExceptionGroup as failures:
            await self.close()
            raise failures.exceptions[0] from None
        except BaseException:
            await self.close()
            raise
        self._spawn(self._supervise())

    async def run(self, request: EpisodeRequest, recorded: Recorded | None = None) -> Episode:
        """The outcome of one episode, exactly once; errors are in it. Cancelling the call cancels the episode.

        With `recorded` replies it is played again with these, and nothing is sampled.
        """
        if self._closed:
            return self._failed(request, "worker", "the pool is closed")
        pending = PendingEpisode(next(self._numbers), request, asyncio.get_running_loop().create_future(), recorded)
        self._pending[pending.number] = pending
        self._waiting.append(pending)
        self._dispatch()
        try:
            return await pending.future
        except asyncio.CancelledError:
            self._cancel(pending)
            raise

    async def close(self) -> None:
        """Stop all workers. Episodes that still run come back as cancelled."""
        self._closed = True
        for task in self._background:
            task.cancel()
        if tasks := self._background | self._stopping:
            await asyncio.wait(tasks)
        for pending in list(self._pending.values()):
            self._fail(pending, "cancelled", "the pool was closed")
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.stop() for worker in workers))

    def replied(self, number: int, reply: bytes) -> None:
        if number in self._pending:
            self._kept.add(number, reply)

    def finished(self, worker: WorkerProcess, number: int, episode: Episode) -> None:
        pending = self._pending.get(number)
        if pending is not None:
            self._resolve(pending, episode)
        self._dispatch()

    def lost(self, worker: WorkerProcess, reason: str) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
        self.restarts += 1
        episodes = [self._pending[number] for number in sorted(worker.running) if number in self._pending]
        resumed = [pending for pending in episodes if self._may_resume(pending, reason)]
        logger.warning(
            "environment %s: worker %d lost with %d episodes, of which %d go on in another: %s",
            self.name,
            worker.pid,
            len(episodes),
            len(resumed),
            reason,
        )
        self.resumed += len(resumed)
        self._waiting.extendleft(reversed(resumed))
        self._dispatch()

    def _may_resume(self, pending: PendingEpisode, reason: str) -> bool:
        """Make an episode of a lost worker ready for another one, or fail it with the reason why it can't go on."""
        turns = self._kept.turns(pending.number)
        problem = None
        if not turns:
            problem = f"{reason} before the first reply"
        elif not self._resumable:
            problem = f'{reason} at turn {turns}; environment "{self.name}" can\'t go on in another (resumable = False)'
        elif self._kept.all(pending.number) is None:
            problem = f"{reason} at turn {turns}; the replies of the pool's episodes were too many to be kept"
        elif turns == pending.resumed_at:
            problem = f"{reason} at turn {turns}, as the one before it did"
        elif pending.resumes == MAX_RESUMES:
            problem = f"{reason} at turn {turns}; {MAX_RESUMES} others died under this episode before it"
        if problem is not None or pending.future.done():
            self._fail(pending, "worker", problem or reason)
            return False
        pending.worker, pending.deadline = None, float("inf")
        pending.resumes, pending.resumed_at = pending.resumes + 1, turns
        return True

    def _dispatch(self) -> None:
        """Send waiting episodes to the workers that run the fewest, and start workers where there are too few."""
        capacity = self._settings.workers.episodes
        while self._waiting and not self._closed:
            open_workers = [w for w in self._workers if not w.retiring and len(w.running) < capacity]
            if not open_workers:
                break
            pending = self._waiting.popleft()
            worker = min(open_workers, key=lambda w: len(w.running))
            pending.worker = worker
            now = time.monotonic()
            pending.began = pending.began or now
            pending.deadline = pending.began + pending.request.timeout + GRACE_SECONDS
            worker.running.add(pending.number)
            replies = self._kept.all(pending.number) or []
            try:
                worker.send(Run(pending.number, pending.request, replies, now - pending.began, pending.recorded))
            except (TypeError, ValueError, OverflowError) as error:
                worker.running.discard(pending.number)
                self._fail(pending, "environment", f"the request can't be sent: {error}")
        self._resize()

    def _resize(self) -> None:
        if self._closed:
            return
        usable = sum(not worker.retiring for worker in self._workers) + self._starting
        wanted = self._settings.workers.min
        if self._waiting and not self._starting:
            wanted = max(wanted, min(usable + 1, self._settings.workers.max))
        for _ in range(wanted - usable):
            self._starting += 1
            self._spawn(self._replace())

    async def _replace(self) -> None:
        """Start one worker, after a pause where starting failed before."""
        try:
            if self._failures:
                await asyncio.sleep(min(FIRST_BACKOFF * 2**self._failures, LONGEST_BACKOFF))
            await self._add_worker()
            self._failures = 0
        except HeadwayError as error:
            self._failures += 1
            logger.error("environment %s: a worker could not be started: %s", self.name, error)
            if self._failures >= START_ATTEMPTS and not self._workers:
                self._give_up(str(error))
        finally:
            self._starting -= 1
        self._dispatch()

    def _give_up(self, reason: str) -> None:
        while self._waiting:
            self._fail(self._waiting.popleft(), "worker", f"no worker can be started: {reason}")

    async def _add_worker(self, first: bool = False) -> list[Task]:
        settings = self._settings
        worker = WorkerProcess(self, self.name, settings.workers.pass_env)
        model = str(self._model)
        start = Start(settings.id, settings.args, self.name, model, self._renderer, self._family, first)
        start.context = None if settings.context is None else settings.context.model_dump()
        start.turn_timeout, start.token = settings.turn_timeout, self._token
        ready = await worker.start(start, settings.workers.memory_gb, self._start_timeout)
        if self._closed:
            await worker.stop()
        else:
            self._workers.append(worker)
        if first:
            self.code, self._resumable = ready.code, ready.resumable
        elif ready.code != self.code:
            logger.warning(
                "environment %s: its code was changed while the run goes on: worker %d has %s, others have %s",
                self.name,
                worker.pid,
                ", ".join(map(str, ready.code)),
                ", ".join(map(str, self.code)),
            )
        return ready.tasks

    async def _supervise(self) -> None:
        """Supervise the workers: heartbeats, stuck episodes, those that retire or idle."""
        interval = min(1.0, self._heartbeat / 5)
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            for pending in [one for one in self._pending.values() if now > one.deadline]:
                self._abandon(pending)
            for worker in list(self._workers):
                if worker.ping(now) > self._heartbeat:
                    await worker.kill(f"the worker hung for {self._heartbeat:g} s")
                elif not worker.running and self._is_surplus(worker, now):
                    self._workers.remove(worker)
                    self._spawn(worker.stop(), self._stopping)
            self._dispatch()

    def _is_surplus(self, worker: WorkerProcess, now: float) -> bool:
        spare = len(self._workers) > self._settings.workers.min
        return worker.retiring or (spare and now - worker.idle_since > self._idle_seconds)

    def _cancel(self, pending: PendingEpisode) -> None:
        if pending.worker is not None:  # it keeps its place there until the worker lets go of it
            pending.worker.send(Cancel(pending.number))
            pending.deadline = time.monotonic() + GRACE_SECONDS
        elif pending in self._waiting:
            self._waiting.remove(pending)
            del self._pending[pending.number]
            self._kept.forget(pending.number)

    def _abandon(self, pending: PendingEpisode) -> None:
        """An episode that ignores its time limit is given up, and its worker takes no new ones."""
        self._fail(pending, "timeout", "the episode ignored its time limit")
        if pending.worker is not None:
            pending.worker.retiring = True
            pending.worker.running.discard(pending.number)

    def _resolve(self, pending: PendingEpisode, episode: Episode) -> None:
        self._pending.pop(pending.number, None)
        self._kept.forget(pending.number)
        if not pending.future.done():
            pending.future.set_result(episode)

    def _fail(self, pending: PendingEpisode, kind: ErrorKind, message: str) -> None:
        self._resolve(pending, self._failed(pending.request, kind, message))

    def _failed(self, request: EpisodeRequest, kind: ErrorKind, message: str) -> Episode:
        return blank_episode(request, self.name, EpisodeError(kind, message))

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]] | None" = None) -> None:
        tasks = self._background if tasks is None else tasks
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
