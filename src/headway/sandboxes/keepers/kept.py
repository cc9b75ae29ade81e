"""A sandbox whose first process is our keeper: commands, pipes and ports go through one socket to it."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence

from headway.sandboxes.keepers.base import VARIABLES, KeeperSandbox, Life
from headway.sandboxes.keepers.connection import KeeperConnection
from headway.sandboxes.output import PIPE_GRACE, Captured
from headway.sandboxes.ports import Connect, relay, to_loopback
from headway.sandboxes.sandbox import WORK, Command, Limit, Limits, Process, SandboxGoneError, shell_code


class KeptSandbox(KeeperSandbox):
    """Talks to a keeper by messages that carry descriptors: pipes and sockets go through the wall themselves."""

    def __init__(
        self, name: str, limits: Limits, connection: KeeperConnection, life: Life, exceeded: Callable[[], Limit | None]
    ) -> None:
        """`exceeded` tells the limit that was hit since the start, if one was."""
        super().__init__(name, limits, connection, life)
        self._connection, self._exceeded = connection, exceeded
        self._seen: Limit | None = None

    async def execute(self, command: Command, out: Captured, err: Captured) -> tuple[int, Limit | None]:
        hit: Limit | None = None
        given = [_stdin(command.stdin), out.pipe(), err.pipe()]
        try:
            number, ended = self._connection.start(
                command.argv, {**VARIABLES, **command.env}, self.resolve(command.cwd), given
            )
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
                async with asyncio.timeout(command.seconds):
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
        code = shell_code(os.waitstatus_to_exitcode(status))
        if hit is None and code:
            hit = self._limit_hit()
        if hit is None and full:
            hit = "disk"
        return code, hit

    def _limit_hit(self) -> Limit | None:
        """The limit that is seen for the first time."""
        found = self._exceeded()
        new, self._seen = found if found != self._seen else None, found
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

    def _inside(self, port: int) -> Connect:
        return lambda: self._connection.open_port("C", port)

    async def forward(self, port: int) -> int:
        listener = await self._connection.open_port("L", port)
        self._servers.append(await asyncio.start_server(relay(to_loopback(port)), sock=listener))
        return port


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
        return shell_code(os.waitstatus_to_exitcode(status))

    def poll(self) -> int | None:
        if not self._ended.done():
            return None
        return shell_code(os.waitstatus_to_exitcode(self._ended.result()[0]))

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
