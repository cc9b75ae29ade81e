"""The worker's side of a stream keeper: commands and connections of one sandbox, multiplexed over two pipes."""

import asyncio
import os
import struct
from collections.abc import Callable, Mapping, Sequence

from headway.sandboxes.keepers.base import packed_command
from headway.sandboxes.sandbox import SandboxGoneError

WINDOW = 1 << 18
"""Bytes of one channel that may be under way; as in stream_keeper.c."""
CHUNK = 1 << 16
_HEADER = struct.Struct("=4i")
_ACCEPTED = 1 << 30
"""The first number of channels that the keeper opened."""


class Channel:
    """One command, connection or listener. Data arrive by `on_data(stream, bytes)`, no bytes being the end."""

    def __init__(self, connection: "FrameConnection", number: int) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.on_data: Callable[[str, bytes], None] | None = None
        self.on_accept: Callable[[Channel], None] | None = None
        self.opened: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[tuple[int, bool]] = loop.create_future()
        """Wait status of a command, and if the disk was full."""
        self.closed = {"O": loop.create_future(), "E": loop.create_future()}
        """Done when no more output will come."""
        self._connection = connection
        self._credit = WINDOW
        self._more = asyncio.Event()

    def kill(self, signal: int = 9) -> None:
        if not self.ended.done():
            self._connection.send("K", self.number, signal)

    def grant(self, count: int) -> None:
        """Let the other side send as many bytes more."""
        if count and not self._connection.lost:
            self._connection.send("G", self.number, count)

    async def write(self, data: bytes) -> None:
        """Send all of `data`, as fast as the other side takes it."""
        view = memoryview(data)
        while view:
            while not self._credit:
                self._more.clear()
                await self._more.wait()
            part = view[: min(CHUNK, self._credit)]
            self._credit -= len(part)
            self._connection.send("I", self.number, 0, part)
            view = view[len(part) :]

    def end(self) -> None:
        """Say that nothing more will be written."""
        self._connection.send("I", self.number)

    def drop(self) -> None:
        """Forget the channel, and what may still come of it."""
        self._connection.drop(self)

    def credited(self, count: int) -> None:
        self._credit += count
        self._more.set()

    def received(self, stream: str, data: bytes) -> None:
        if not data and not self.closed[stream].done():
            self.closed[stream].set_result(None)
        if self.on_data is None:
            self.grant(len(data))
        else:
            self.on_data(stream, data)

    def lose(self) -> None:
        for future in (self.opened, self.ended):
            if not future.done():
                future.set_exception(SandboxGoneError("the sandbox has ended"))
                future.exception()  # nobody may be waiting
        for stream in "OE":
            self.received(stream, b"")
        self._more.set()
        self._credit = WINDOW  # who writes goes on, and finds that the sandbox is gone


class FrameConnection:
    """Frames to and from a stream keeper. See stream_keeper.c for the protocol."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.lost = False
        self._numbers = 0
        self._channels: dict[int, Channel] = {}
        self._writer: asyncio.WriteTransport | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, outlet: int, inlet: int) -> None:
        """Talk over these descriptors, which are closed at the end."""
        reader = asyncio.StreamReader(1 << 20)
        await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(outlet, "rb", 0))
        transport, _ = await self._loop.connect_write_pipe(_Closing(self), os.fdopen(inlet, "wb", 0))
        self._writer = transport
        self._task = self._loop.create_task(self._read(reader))

    def send(self, operation: str, number: int, value: int = 0, data: bytes | memoryview = b"") -> None:
        if self.lost or self._writer is None:
            raise SandboxGoneError("the sandbox has ended")
        self._writer.write(_HEADER.pack(ord(operation), number, value, len(data)) + bytes(data))

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        on_data: "Callable[[Channel, str, bytes], None]",
    ) -> Channel:
        """Start a command."""
        packed = packed_command(argv, env, cwd)
        channel = self._channel()
        channel.on_data = lambda stream, data: on_data(channel, stream, data)
        self.send("R", channel.number, 0, packed)
        return channel

    async def open_port(self, operation: str, port: int) -> Channel:
        """Connect to ("C") or listen on ("L") a loopback port of the sandbox."""
        channel = self._channel()
        self.send(operation, channel.number, port)
        problem = await channel.opened
        if problem:
            self._channels.pop(channel.number, None)
            raise OSError(problem, f"port {port} in the sandbox: {os.strerror(problem)}")
        return channel

    def drop(self, channel: Channel) -> None:
        if self._channels.pop(channel.number, None) is not None and not self.lost:
            self.send("D", channel.number)

    def close(self) -> None:
        """Hang up: the keeper ends, and with it everything in the sandbox."""
        if self._task is not None:
            self._task.cancel()
        if self._writer is not None and not self._writer.is_closing():
            self._writer.abort()
        self.lose()

    def lose(self) -> None:
        if self.lost:
            return
        self.lost = True
        if not self.ready.done():
            self.ready.set_exception(SandboxGoneError("the sandbox has ended"))
            self.ready.exception()
        for channel in self._channels.values():
            channel.lose()
        self._channels.clear()

    def _channel(self, number: int = 0) -> Channel:
        if not number:
            self._numbers = self._numbers % (_ACCEPTED - 1) + 1
        channel = self._channels[number or self._numbers] = Channel(self, number or self._numbers)
        return channel

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                operation, number, value, length = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                if not 0 <= length <= CHUNK:
                    break
                self._received(chr(operation), number, value, await reader.readexactly(length) if length else b"")
        except (asyncio.IncompleteReadError, OSError, ValueError):
            pass  # what is inside may write anything; then the sandbox is given up
        finally:
            self.lose()

    def _received(self, operation: str, number: int, value: int, data: bytes) -> None:
        channel = self._channels.get(number)
        if operation == "S":
            if not self.ready.done():
                self.ready.set_result(None)
        elif channel is None:
            return
        elif operation in "OE":
            channel.received(operation, data)
        elif operation == "X":
            if not channel.ended.done():
                channel.ended.set_result((value & 0xFFFF, bool(value >> 16)))
        elif operation == "G":
            channel.credited(value)
        elif operation in "CL":
            if not channel.opened.done():
                channel.opened.set_result(value)
        elif operation == "A" and channel.on_accept is not None and value >= _ACCEPTED and value not in self._channels:
            channel.on_accept(self._channel(value))


class _Closing(asyncio.BaseProtocol):
    """Tells the connection when its pipe breaks."""

    def __init__(self, connection: FrameConnection) -> None:
        self._connection = connection

    def __call__(self) -> "_Closing":
        return self

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.lose()
