"""A sandbox whose first process is our stream keeper: all that crosses its wall is bytes in two pipes."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

from headway.sandboxes.frames import CHUNK, Channel, FrameConnection
from headway.sandboxes.kept import PIPE_GRACE, VARIABLES
from headway.sandboxes.output import Captured
from headway.sandboxes.ports import relay
from headway.sandboxes.sandbox import WORK, Limit, Limits, Process, Sandbox, SandboxGoneError, Snapshot

DYING_SECONDS = 10.0


class StreamedSandbox(Sandbox):
    """Talks to a stream keeper. `kill` ends the sandbox from outside.

    `gone` is done once nothing of it is left, with the limit that killed it, if one did.
    """

    def __init__(
        self,
        name: str,
        limits: Limits,
        connection: FrameConnection,
        kill: Callable[[], None],
        gone: "asyncio.Future[str | None]",
        again: Callable[[Snapshot], Awaitable[Sandbox]],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.limits = name, limits
        self._connection, self._kill, self._gone, self._again = connection, kill, gone, again
        self._variables = {**VARIABLES, **(variables or {})}
        self._servers: list[asyncio.Server] = []
        self._carrying: set[asyncio.Task[None]] = set()

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
        captured = {"O": out, "E": err}

        def received(channel: Channel, stream: str, data: bytes) -> None:
            captured[stream].feed(data)
            channel.grant(len(data))

        channel = self._connection.run(argv, {**self._variables, **env}, self.resolve(cwd), received)
        out.on_flood = err.on_flood = channel.kill
        feeding = asyncio.ensure_future(_feed(channel, stdin))
        hit: Limit | None = None
        try:
            try:
                async with asyncio.timeout(seconds):
                    status, full = await asyncio.shield(channel.ended)
            except TimeoutError:
                hit = "time"
                channel.kill()
                status, full = await channel.ended
            await asyncio.wait(channel.closed.values(), timeout=PIPE_GRACE)
        except SandboxGoneError:
            killer = await self._killer()
            if killer is None:
                raise
            return 137, killer
        except BaseException:
            with contextlib.suppress(SandboxGoneError):
                channel.kill()
            raise
        finally:
            feeding.cancel()
            with contextlib.suppress(SandboxGoneError):
                channel.drop()
        code = _exit_code(status)
        return code, hit or ("disk" if full else None)

    async def _killer(self) -> Limit | None:
        """The limit that ended the whole sandbox, where one did: kernels of others die as one."""
        with contextlib.suppress(TimeoutError):
            found = await asyncio.wait_for(asyncio.shield(self._gone), DYING_SECONDS)
            return "memory" if found == "memory" else "processes" if found == "processes" else None
        return None

    async def open_process(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> "StreamedProcess":
        streams = {"O": asyncio.StreamReader(), "E": asyncio.StreamReader()}
        valves: dict[str, _Valve] = {}

        def received(channel: Channel, stream: str, data: bytes) -> None:
            if not valves:
                for name, reader in streams.items():
                    valves[name] = _Valve(channel)
                    reader.set_transport(valves[name])
            if data:
                streams[stream].feed_data(data)
                valves[stream].passed(len(data))
            else:
                streams[stream].feed_eof()

        variables = {**self._variables, **(env or {})}
        channel = self._connection.run(list(argv), variables, self.resolve(cwd or WORK), received)
        return StreamedProcess(channel, streams["O"], streams["E"])

    async def expose(self, port: int) -> str:
        async def inside() -> socket.socket:
            return self._carry(await self._connection.open_port("C", port))

        server = await asyncio.start_server(relay(inside), "127.0.0.1", 0)
        self._servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def forward(self, port: int) -> int:
        listener = await self._connection.open_port("L", port)

        async def outside() -> "tuple[asyncio.StreamReader, asyncio.StreamWriter]":
            return await asyncio.open_connection("127.0.0.1", port)

        async def join(channel: Channel) -> None:
            reader, writer = await asyncio.open_connection(sock=self._carry(channel))
            await relay(outside)(reader, writer)

        listener.on_accept = lambda channel: self._keep(join(channel))
        return port

    def _carry(self, channel: Channel) -> socket.socket:
        """Return a socket whose bytes are the channel's."""
        ours, theirs = socket.socketpair()
        self._keep(_pump(channel, ours))
        return theirs

    def _keep(self, work: "Awaitable[None]") -> None:
        task = asyncio.ensure_future(work)
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def fork(self) -> Sandbox:
        return await self._again(await self.snapshot())

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._carrying:
            task.cancel()
        self._connection.close()
        self._kill()
        await asyncio.shield(self._gone)


class StreamedProcess(Process):
    """A live process behind a stream keeper."""

    def __init__(self, channel: Channel, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        self._channel, self.stdout, self.stderr = channel, stdout, stderr

    async def write(self, data: bytes) -> None:
        await self._channel.write(data)

    async def wait(self) -> int:
        return _exit_code((await asyncio.shield(self._channel.ended))[0])

    def poll(self) -> int | None:
        return _exit_code(self._channel.ended.result()[0]) if self._channel.ended.done() else None

    async def kill(self, signal: int = 9) -> None:
        self._channel.kill(signal)


class _Valve(asyncio.ReadTransport):
    """Holds back what the other side may send while a stream reader is full."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel, self._held, self._open = channel, 0, True

    def passed(self, count: int) -> None:
        self._held += count
        if self._open:
            self.resume_reading()

    def pause_reading(self) -> None:
        self._open = False

    def resume_reading(self) -> None:
        self._open = True
        held, self._held = self._held, 0
        self._channel.grant(held)


async def _feed(channel: Channel, data: bytes) -> None:
    with contextlib.suppress(SandboxGoneError):
        await channel.write(data)
        channel.end()


async def _pump(channel: Channel, ours: socket.socket) -> None:
    """Carry bytes between a channel and a socket until both directions have ended."""
    arrived: asyncio.Queue[bytes] = asyncio.Queue()
    channel.on_data = lambda stream, data: arrived.put_nowait(data) if stream == "O" else None
    reader, writer = await asyncio.open_connection(sock=ours)

    async def inward() -> None:
        while data := await reader.read(CHUNK):
            await channel.write(data)
        channel.end()

    async def outward() -> None:
        while data := await arrived.get():
            writer.write(data)
            await writer.drain()
            channel.grant(len(data))
        writer.write_eof()

    try:
        with contextlib.suppress(ConnectionError, SandboxGoneError):
            await asyncio.gather(inward(), outward())
    finally:
        writer.close()
        with contextlib.suppress(SandboxGoneError):
            channel.drop()


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
