"""Sandboxes on a host, and processes in them, as this machine sees them."""

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from aiohttp import ClientWebSocketResponse, WSMsgType

from headway.sandboxes.output import Captured
from headway.sandboxes.remote.link import Link
from headway.sandboxes.remote.snapshots import digest
from headway.sandboxes.remote.wire import Created, Executed, ExecuteRequest, carry, decode, encode
from headway.sandboxes.sandbox import WORK, Command, Limit, Process, Sandbox, SandboxError, SandboxGoneError, Snapshot

_WAITING = 4
"""Connections that can arrive at a forwarded port at once; each that is taken is replaced."""


class HostedSandbox(Sandbox):
    """A sandbox on a host."""

    def __init__(self, link: Link, created: Created) -> None:
        self.name, self.limits = created.name, created.limits
        self._link, self._route = link, f"/v1/sandboxes/{created.name}"
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def execute(self, command: Command, out: Captured, err: Captured) -> tuple[int, Limit | None]:
        request = ExecuteRequest(
            list(command.argv), command.seconds, dict(command.env), command.stdin, command.cwd, (out.limit, err.limit)
        )
        done = decode(await self._link.request("POST", f"{self._route}/execute", encode(request)), Executed)
        out.unpack(*done.stdout)
        err.unpack(*done.stderr)
        return done.code, done.limit

    async def snapshot(self) -> Snapshot:
        return Snapshot(await self._link.request("POST", f"{self._route}/snapshot"))

    async def restore(self, snapshot: Snapshot) -> None:
        await self._link.with_snapshot("POST", f"{self._route}/restore/{digest(snapshot)}", snapshot)

    async def fork(self) -> Sandbox:
        return HostedSandbox(self._link, decode(await self._link.request("POST", f"{self._route}/fork"), Created))

    async def open_process(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Process:
        socket = await self._link.upgrade(f"{self._route}/process")
        await socket.send_bytes(encode(ExecuteRequest(list(argv), 0.0, dict(env or {}), cwd=cwd or WORK)))
        process = HostedProcess(socket)
        self._keep(process.follow())
        return process

    async def expose(self, port: int) -> str:
        async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                socket = await self._link.upgrade(f"{self._route}/connect/{port}")
            except (OSError, SandboxError):  # nobody listens there: the caller sees its connection close
                writer.close()
                return
            await carry(socket, reader, writer)
            await socket.close()

        server = await asyncio.start_server(join, "127.0.0.1", 0)
        self._servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def forward(self, port: int) -> int:
        inside = decode(await self._link.request("POST", f"{self._route}/listen"), int)
        for _ in range(_WAITING):
            self._keep(self._accept(inside, port))
        return inside

    async def _accept(self, inside: int, port: int) -> None:
        """Wait for one connection at a port inside, and join it with one to `port` here."""
        with contextlib.suppress(OSError, SandboxError):
            socket = await self._link.upgrade(f"{self._route}/accept/{inside}")
            self._keep(self._accept(inside, port))
            try:
                await carry(socket, *await asyncio.open_connection("127.0.0.1", port))
            finally:
                await socket.close()

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(SandboxError):  # gone with the session
            await self._link.request("DELETE", self._route)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class HostedProcess(Process):
    """A live process in a sandbox on a host."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self.stdout, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        self._gates = [_Gate(), _Gate()]
        for reader, gate in zip((self.stdout, self.stderr), self._gates, strict=True):
            reader.set_transport(gate)
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def follow(self) -> None:
        """Read what the host sends of the process, as fast as its output is read here."""
        streams = {b"O": self.stdout, b"E": self.stderr}
        try:
            while (message := await self._socket.receive()).type is WSMsgType.BINARY:
                mark, data = message.data[:1], message.data[1:]
                if mark == b"X":
                    self._ended.set_result(decode(data, int))
                elif data:
                    streams[mark].feed_data(data)
                    for gate in self._gates:
                        await gate.open.wait()
                else:
                    streams[mark].feed_eof()
        finally:
            for reader in streams.values():
                reader.feed_eof()
            if not self._ended.done():
                self._ended.set_exception(SandboxGoneError("the sandbox has ended"))
                self._ended.exception()  # nobody may be waiting

    async def write(self, data: bytes) -> None:
        await self._socket.send_bytes(b"I" + data)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def poll(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def kill(self, signal: int = 9) -> None:
        with contextlib.suppress(ConnectionError):
            await self._socket.send_bytes(b"K" + encode(signal))


class _Gate(asyncio.ReadTransport):
    """Says when a stream reader is full."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.open.set()

    def pause_reading(self) -> None:
        self.open.clear()

    def resume_reading(self) -> None:
        self.open.set()
