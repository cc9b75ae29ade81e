"""A worker process: runs the episodes of one environment for a pool, and ends with it.

Started by the pool as `python -m headway.envs.workers.worker SOCKET [MEMORY]`.
"""

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import traceback
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from headway.base.errors import HeadwayError
from headway.base.processes import die_with_parent
from headway.config.context import ContextRule
from headway.core.episodes import Episode, EpisodeError, EpisodeRequest, Task
from headway.envs.base import Environment
from headway.envs.engines.engines import Engines
from headway.envs.episodes import EpisodeRunner, as_error, blank_episode
from headway.envs.packages.versions import imported_versions
from headway.envs.registry import environment_modules, load_environment
from headway.envs.reply_log import RecordedReplies, ReplyLog
from headway.envs.tasks import check_tasks
from headway.envs.threads import abandoned
from headway.envs.workers import frames
from headway.rendering.load import load_renderer

logger = logging.getLogger(__name__)

RETIRE_AT = 8
"""Hung threads after which a worker asks to be replaced."""
CLOSE_SECONDS = 5.0
_CONTEXT: TypeAdapter[ContextRule] = TypeAdapter(ContextRule)


class Worker:
    """Answers the pool's frames. Each episode is a task of the event loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._connection = frames.FrameConnection(self._received, self._lost)
        self._starting: asyncio.Future[frames.Start] = loop.create_future()
        self._stopped = asyncio.Event()
        self._engines = Engines()
        self._episodes: dict[int, asyncio.Task[Episode]] = {}
        self._runner: EpisodeRunner | None = None
        self._resumable = False
        self._name = ""
        self._retiring = False

    async def serve(self, pool: socket.socket) -> None:
        """Serve until the pool says stop or is gone."""
        await asyncio.get_running_loop().create_connection(lambda: self._connection, sock=pool)
        start = await self._starting
        try:
            environment, tasks = await self._open(start)
            code = imported_versions(environment_modules(start.env, environment))
            self._connection.send(frames.Ready(tasks if start.tasks else [], code, environment.resumable))
        except Exception as error:
            logger.debug("environment %s failed to start", start.env, exc_info=True)
            reason = f'environment "{start.env}" failed to start: {type(error).__name__}: {error}'
            self._connection.send(frames.Failed(str(error) if isinstance(error, HeadwayError) else reason))
            self._connection.close()
        else:
            await self._stopped.wait()
            await self._shut_down(environment)
            self._connection.close()
        await self._stopped.wait()

    async def _open(self, start: frames.Start) -> tuple[Environment, list[Task]]:
        environment = load_environment(start.env, start.args)
        environment.check()
        tasks = list(environment.tasks())
        check_tasks(start.env, tasks)
        renderer = load_renderer(Path(start.model), start.renderer, start.family)
        await environment.open()
        self._name, self._resumable, self._engines.token = start.name, environment.resumable, start.token
        context = None if start.context is None else _CONTEXT.validate_python(start.context)
        self._runner = EpisodeRunner(environment, start.name, renderer, self._engines, context, start.turn_timeout)
        return environment, tasks

    async def _shut_down(self, environment: Environment) -> None:
        running = list(self._episodes.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CLOSE_SECONDS)
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await environment.close()
                await self._engines.close()
        except Exception:
            logger.exception("environment %s could not be closed", self._name)

    def _received(self, data: bytes) -> None:
        match frames.to_worker.decode(data):
            case frames.Run() as run:
                self._begin(run)
            case frames.Cancel(number=number) if number in self._episodes:
                self._episodes[number].cancel()
            case frames.Ping():
                self._connection.send(frames.Pong())
            case frames.Start() as start:
                self._starting.set_result(start)
            case frames.Stop():
                self._stopped.set()

    def _begin(self, run: frames.Run) -> None:
        assert self._runner is not None, "the pool sends no episodes before the worker is ready"
        log = (
            RecordedReplies(run.recorded)
            if run.recorded is not None
            else ReplyLog(run.replies, partial(self._replied, run.number), whole=self._resumable)
        )
        task = asyncio.get_running_loop().create_task(self._runner.run(run.request, log, run.spent))
        task.add_done_callback(partial(self._finished, run.number, run.request))
        self._episodes[run.number] = task

    def _replied(self, number: int, reply: bytes) -> None:
        self._connection.send(frames.Replied(number, reply))

    def _finished(self, number: int, request: EpisodeRequest, task: "asyncio.Task[Episode]") -> None:
        del self._episodes[number]
        if task.cancelled():  # before it took its first step
            episode = blank_episode(request, self._name, EpisodeError("cancelled", "the episode was cancelled"))
        elif error := task.exception():
            episode = blank_episode(request, self._name, as_error(error))
        else:
            episode = task.result()
        self._report(number, request, episode)
        if not self._retiring and abandoned() >= RETIRE_AT:
            self._retiring = True
            self._connection.send(frames.Retiring(f"{abandoned()} tool calls have not returned"))

    def _report(self, number: int, request: EpisodeRequest, episode: Episode) -> None:
        try:
            self._connection.send(frames.Done(number, episode))
        except Exception as error:  # an environment put something into the episode that cannot be sent
            self._connection.send(frames.Done(number, blank_episode(request, self._name, as_error(error))))

    def _lost(self) -> None:
        self._starting.cancel()
        self._stopped.set()


async def _main(pool: socket.socket) -> None:
    await Worker().serve(pool)
    sys.stdout.flush()
    os._exit(0)  # tasks and threads that hang must not keep the process


def _limit_memory(limit: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (OSError, ValueError) as error:  # macOS has no such limit
        print(f"the memory of this worker is not limited, as this system cannot: {error}", file=sys.stderr)


def main(argv: list[str]) -> None:
    die_with_parent()  # even while the event loop hangs
    if len(argv) > 1:
        _limit_memory(int(argv[1]))
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the pool, which stops its workers
    asyncio.run(_main(socket.socket(fileno=int(argv[0]))))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
