"""The connection to a host, which all its sandboxes end with."""

import asyncio
import contextlib
from collections.abc import Coroutine
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

from headway.sandboxes.remote.snapshots import digest
from headway.sandboxes.remote.wire import HEARTBEAT, MAX_BODY, SESSION
from headway.sandboxes.sandbox import SandboxError, SandboxGoneError, Snapshot

_CONNECT_SECONDS = 30.0
T = TypeVar("T")


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


class _MissingError(SandboxError):
    """The host does not have the snapshot."""


async def _awaited(opening: Any) -> ClientWebSocketResponse:
    socket: ClientWebSocketResponse = await opening
    return socket
