"""The `host` back end: sandboxes that a `headway sandboxes` service runs on another machine."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import (
    ClientError,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    TCPConnector,
    WSMsgType,
    WSServerHandshakeError,
)

from headway.sandboxes.backend import SnapshotBackend
from headway.sandboxes.output import Captured
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.remote.snapshots import digest
from headway.sandboxes.remote.wire import (
    HEARTBEAT,
    MAX_BODY,
    SESSION,
    Created,
    CreateRequest,
    Executed,
    ExecuteRequest,
    carry,
    decode,
    encode,
    read_access,
)
from headway.sandboxes.sandbox import (
    WORK,
    Command,
    Limit,
    Limits,
    Process,
    Sandbox,
    SandboxError,
    SandboxGoneError,
    Snapshot,
)

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 30.0
_RETRY_SECONDS = 1.0
_WAITING = 4
"""Connections that can arrive at a forwarded port at once; each that is taken is replaced."""
T = TypeVar("T")


class HostBackend(SnapshotBackend):
    """Asks a host for sandboxes. If the connection to it is lost they all end; the next one opens another."""

    name = "host"
    takes = 'the access file of a host, as in "host:/path/to/access.json"'
    patience = 60.0
    """Seconds to wait for a host that does not answer: one that was killed may be starting again."""

    def __init__(self, access: str) -> None:
        super().__init__()
        self._access = read_access(Path(access))
        self._opening = asyncio.Lock()
        self._link: Link | None = None

    @classmethod
    def check(cls) -> None:
        return None

    async def create(
        self, recipe: Recipe | None = None, limits: Limits | None = None, snapshot: Snapshot | None = None
    ) -> Sandbox:
        recipe, limits = recipe or Recipe(), limits or Limits()
        snapshot = snapshot or await self._beginning(recipe)
        return await self._begin(recipe, limits, snapshot)

    async def close(self) -> None:
        self._prepared.cancel()
        if self._link is not None:
            await self._link.close()

    async def _start(self, recipe: Recipe, limits: Limits) -> Sandbox:
        return await self._begin(recipe, limits, None)

    async def _begin(self, recipe: Recipe, limits: Limits, snapshot: Snapshot | None) -> Sandbox:
        async with self._opening:
            if self._link is not None and self._link.lost.done():
                await self._link.close()
                self._link = None
            link = self._link = self._link or await self._open()
        name = digest(snapshot) if snapshot else ""
        request = CreateRequest(limits, name, [str(path) for path in recipe.readable])
        reply = await link.with_snapshot("POST", "/v1/sandboxes", snapshot, encode(request))
        return HostedSandbox(link, decode(reply, Created))

    async def _open(self) -> "Link":
        deadline = asyncio.get_running_loop().time() + self.patience
        while True:
            try:
                return await Link.open(self._access.url, self._access.token)
            except HostUnreachableError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                logger.warning("%s; trying again", error)
                await asyncio.sleep(_RETRY_SECONDS)


class HostUnreachableError(SandboxError):
    """Nobody answers at a host's address."""


class Link:
    """The session with a host. `lost` is done once it is over, and then so is every sandbox."""

    def __init__(self, http: ClientSession, socket: ClientWebSocketResponse, session: str) -> None:
        self._http, self._socket = http, socket
        self._headers = {SESSION: session}
        self.lost: asyncio.Future[None] = asyncio.ensure_future(self._watch())

    @classmethod
    async def open(cls, url: str, token: str) -> "Link":
        """Open a session. Raises SandboxError where nobody answers, or the token is wrong."""
        timeout = ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        http = ClientSession(
            url, headers={"Authorization": f"Bearer {token}"}, timeout=timeout, connector=TCPConnector(limit=0)
        )
        try:
            socket = await http.ws_connect("/v1/session", heartbeat=HEARTBEAT)
            return cls(http, socket, await socket.receive_str())
        except (OSError, ClientError, TypeError) as error:
            await http.close()
            refused = isinstance(error, WSServerHandshakeError) and error.status == 401
            if refused:
                raise SandboxError(f"the host at {url} does not know the token of the access file") from None
            raise HostUnreachableError(f"no sandboxes from the host at {url}: {error}") from None

    async def request(self, method: str, route: str, body: bytes = b"") -> bytes:
        """Return the answer to a request. Raises SandboxGoneError where the sandbox or the session is over."""
        return await self._while_open(self._request(method, route, body))

    async def with_snapshot(self, method: str, route: str, snapshot: Snapshot | None, body: bytes = b"") -> bytes:
        """Return the answer to a request that names a snapshot, which is sent where the host has it not."""
        try:
            return await self.request(method, route, body)
        except _MissingError:
            if snapshot is None:
                raise
        await self.request("PUT", f"/v1/snapshots/{digest(snapshot)}", snapshot.archive)
        return await self.request(method, route, body)

    async def upgrade(self, route: str) -> ClientWebSocketResponse:
        """Open a WebSocket. Raises OSError where the host refuses."""
        try:
            opening = self._http.ws_connect(route, headers=self._headers, heartbeat=HEARTBEAT, max_msg_size=MAX_BODY)
            return await self._while_open(_awaited(opening))
        except ClientError as error:
            raise ConnectionRefusedError(str(error)) from None

    async def close(self) -> None:
        await self._socket.close()
        await self._http.close()
        with contextlib.suppress(asyncio.CancelledError):
            await self.lost

    async def _request(self, method: str, route: str, body: bytes) -> bytes:
        try:
            async with self._http.request(method, route, data=body, headers=self._headers) as answer:
                content = await answer.read()
        except (OSError, ClientError) as error:
            raise SandboxGoneError(
                f"the host of the sandbox does not answer ({error or type(error).__name__})"
            ) from None
        if answer.status == 200:
            return content
        try:
            message = str(msgspec.json.decode(content, type=dict[str, str])["error"])
        except (msgspec.DecodeError, KeyError):
            message = f"the host answered with status {answer.status}"
        raise {404: _MissingError, 410: SandboxGoneError}.get(answer.status, SandboxError)(message)

    async def _while_open(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, unless the session ends first."""
        task = asyncio.ensure_future(work)
        try:
            both: list[asyncio.Future[Any]] = [task, self.lost]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise SandboxGoneError("the connection to the host of the sandbox was lost")
        finally:
            task.cancel()

    async def _watch(self) -> None:
        while (await self._socket.receive()).type in (WSMsgType.TEXT, WSMsgType.BINARY):
            pass


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


class _MissingError(SandboxError):
    """The host does not have the snapshot."""


async def _awaited(opening: Any) -> ClientWebSocketResponse:
    socket: ClientWebSocketResponse = await opening
    return socket
