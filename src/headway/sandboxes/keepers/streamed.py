"""A sandbox whose first process is our stream keeper: all that crosses its wall is bytes in two pipes."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path

from headway.base.compiler import program
from headway.base.errors import HeadwayError
from headway.sandboxes.keepers.base import VARIABLES, KeeperSandbox, Life
from headway.sandboxes.keepers.frames import CHUNK, Channel, FrameConnection
from headway.sandboxes.output import PIPE_GRACE, Captured
from headway.sandboxes.ports import Connect, relay, to_loopback
from headway.sandboxes.sandbox import (
    WORK,
    Command,
    Limit,
    Limits,
    Process,
    SandboxGoneError,
    SandboxUnavailableError,
    shell_code,
)

DYING_SECONDS = 10.0
PROGRAM = Path(__file__).with_name("stream_keeper.c")


def stream_keeper(kind: str) -> Path:
    """Compile the stream keeper. Raises SandboxUnavailableError, for a back end called `kind`, where that fails."""
    try:
        return program("sandbox-stream-keeper", PROGRAM)
    except HeadwayError as error:
        raise SandboxUnavailableError(f'sandboxes of kind "{kind}" need a C compiler ({error})') from None


class StreamedSandbox(KeeperSandbox):
    """Talks to a stream keeper: commands and connections are channels of one stream of bytes."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        connection: FrameConnection,
        life: Life,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, limits, connection, life)
        self._connection = connection
        self._variables = {**VARIABLES, **(variables or {})}
        self._carrying: set[asyncio.Task[None]] = set()

    async def execute(self, command: Command, out: Captured, err: Captured) -> tuple[int, Limit | None]:
        captured = {"O": out, "E": err}

        def received(channel: Channel, stream: str, data: bytes) -> None:
            captured[stream].feed(data)
            channel.grant(len(data))

        channel = self._connection.run(
            command.argv, {**self._variables, **command.env}, self.resolve(command.cwd), received
        )
        out.on_flood = err.on_flood = channel.kill
        feeding = asyncio.ensure_future(_feed(channel, command.stdin))
        hit: Limit | None = None
        try:
            try:
                async with asyncio.timeout(command.seconds):
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
            found = await asyncio.wait_for(asyncio.shield(self._life.gone), DYING_SECONDS)
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

    def _inside(self, port: int) -> Connect:
        async def connect() -> socket.socket:
            return self._carry(await self._connection.open_port("C", port))

        return connect

    async def forward(self, port: int) -> int:
        listener = await self._connection.open_port("L", port)

        async def join(channel: Channel) -> None:
            reader, writer = await asyncio.open_connection(sock=self._carry(channel))
            await relay(to_loopback(port))(reader, writer)

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

    async def stop(self) -> None:
        for task in self._carrying:
            task.cancel()
        await super().stop()


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
    return shell_code(os.waitstatus_to_exitcode(status))
