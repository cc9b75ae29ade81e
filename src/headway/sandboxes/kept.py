"""A sandbox whose first process is our keeper: commands, pipes and ports go through one socket to it."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence

from headway.sandboxes.cgroups import Cgroup
from headway.sandboxes.connection import KeeperConnection
from headway.sandboxes.output import Captured
from headway.sandboxes.ports import relay
from headway.sandboxes.sandbox import (
    HOME,
    WORK,
    Limit,
    Limits,
    Process,
    Sandbox,
    SandboxGoneError,
    Snapshot,
)

PIPE_GRACE = 0.25
"""Seconds that a command's pipes are read after it has ended, while processes it left behind hold them."""
VARIABLES = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": HOME,
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
    "PYTHONDONTWRITEBYTECODE": "1",
}


class KeptSandbox(Sandbox):
    """Talks to a keeper. `kill` ends the sandbox from outside; `gone` is done once nothing of it is left."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        connection: KeeperConnection,
        kill: Callable[[], None],
        gone: "asyncio.Future[str | None]",
        group: Cgroup | None,
        again: Callable[[Snapshot], Awaitable[Sandbox]],
    ) -> None:
        self.name, self.limits = name, limits
        self._connection, self._kill, self._gone, self._group, self._again = connection, kill, gone, group, again
        self._servers: list[asyncio.Server] = []
        self._exceeded: Limit | None = None

    async def _execute(
        self,
        argv: list[str],
        env: dict[str, str],
        stdin: bytes,
        seconds: float,
        cwd: str,
        out: Captured,
        err: Captured,
    ) -> tuple[int, Limit | None]:
        hit: Limit | None = None
        given = [_stdin(stdin), out.pipe(), err.pipe()]
        try:
            number, ended = self._connection.start(argv, {**VARIABLES, **env}, self.resolve(cwd), given)
        except BaseException:
            out.close()
            err.close()
            raise
        finally:
            for descriptor in given:
                os.close(descriptor)
        out.on_flood = err.on_flood = lambda: self._connection.kill(number)
        try:
            try:
                async with asyncio.timeout(seconds):
                    status, full, _ = await asyncio.shield(ended)
            except TimeoutError:
                hit = "time"
                self._connection.kill(number)
                status, full, _ = await ended
        except BaseException:
            with contextlib.suppress(SandboxGoneError):
                self._connection.kill(number)
            out.close()
            err.close()
            raise
        await out.finished(PIPE_GRACE)
        await err.finished(PIPE_GRACE)
        code = os.waitstatus_to_exitcode(status)
        code = code if code >= 0 else 128 - code
        if hit is None and code:
            hit = self._limit_hit()
        if hit is None and full:
            hit = "disk"
        return code, hit

    def _limit_hit(self) -> Limit | None:
        """The limit that the group's counters show for the first time."""
        found = self._group.exceeded() if self._group is not None else None
        new, self._exceeded = found if found != self._exceeded else None, found
        return new

    async def open_process(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> "KeptProcess":
        loop = asyncio.get_running_loop()
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours_err, theirs_err = os.pipe()
        given = [theirs_in, theirs_out, theirs_err]
        try:
            variables = {**VARIABLES, **(env or {})}
            number, ended = self._connection.start(list(argv), variables, self.resolve(cwd or WORK), given)
        except BaseException:
            for descriptor in (ours_in, ours_out, ours_err):
                os.close(descriptor)
            raise
        finally:
            for descriptor in given:
                os.close(descriptor)
        streams = []
        for descriptor in (ours_out, ours_err):
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            await loop.connect_read_pipe(lambda made=protocol: made, os.fdopen(descriptor, "rb", 0))  # type: ignore[misc]
            streams.append(reader)
        transport, flow = await loop.connect_write_pipe(
            lambda: asyncio.streams.FlowControlMixin(loop), os.fdopen(ours_in, "wb", 0)
        )
        writer = asyncio.StreamWriter(transport, flow, None, loop)
        return KeptProcess(self._connection, number, ended, writer, *streams)

    async def expose(self, port: int) -> str:
        server = await asyncio.start_server(relay(lambda: self._connection.open_port("C", port)), "127.0.0.1", 0)
        self._servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def forward(self, port: int) -> int:
        listener = await self._connection.open_port("L", port)

        async def outside() -> "tuple[asyncio.StreamReader, asyncio.StreamWriter]":
            return await asyncio.open_connection("127.0.0.1", port)

        self._servers.append(await asyncio.start_server(relay(outside), sock=listener))
        return port

    async def fork(self) -> Sandbox:
        return await self._again(await self.snapshot())

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        self._connection.close()
        self._kill()
        await asyncio.shield(self._gone)


class KeptProcess(Process):
    """A live process behind a keeper."""

    def __init__(
        self,
        connection: KeeperConnection,
        number: int,
        ended: "asyncio.Future[tuple[int, int, list[int]]]",
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
    ) -> None:
        self._connection, self._number, self._ended, self._stdin = connection, number, ended, stdin
        self.stdout, self.stderr = stdout, stderr

    async def write(self, data: bytes) -> None:
        self._stdin.write(data)
        await self._stdin.drain()

    async def wait(self) -> int:
        status, _, _ = await asyncio.shield(self._ended)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def poll(self) -> int | None:
        if not self._ended.done():
            return None
        code = os.waitstatus_to_exitcode(self._ended.result()[0])
        return code if code >= 0 else 128 - code

    async def kill(self, signal: int = 9) -> None:
        self._connection.kill(self._number, signal)


def _stdin(data: bytes) -> int:
    """A descriptor to read `data` from; a file, so that nobody has to feed it."""
    if not data:
        return os.open("/dev/null", os.O_RDONLY)
    handle = os.memfd_create("stdin")
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
    os.lseek(handle, 0, os.SEEK_SET)
    return handle
