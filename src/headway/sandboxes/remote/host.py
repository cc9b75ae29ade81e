"""The host service: sandboxes for other machines over HTTP.

A client opens a session, a WebSocket, and its sandboxes live no longer than that. Every route demands the token.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from aiohttp import WSMsgType, web

from headway.sandboxes.local.sweep import state_folder
from headway.sandboxes.output import Captured
from headway.sandboxes.pool import SandboxPool
from headway.sandboxes.remote.session import Lent, Session
from headway.sandboxes.remote.snapshots import SnapshotStore
from headway.sandboxes.remote.wire import (
    HEARTBEAT,
    MAX_BODY,
    MAX_SNAPSHOT,
    SESSION,
    Created,
    CreateRequest,
    Executed,
    ExecuteRequest,
    carry,
    decode,
    encode,
)
from headway.sandboxes.sandbox import WORK, Command, Limits, Process, SandboxError, SandboxGoneError
from headway.transport.control.tokens import is_bearer

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SandboxHost:
    """The routes around one pool. `shown` are folders that clients may have in their sandboxes, read-only."""

    def __init__(self, pool: SandboxPool, token: str, shown: Sequence[Path] = ()) -> None:
        self._pool, self._token = pool, token
        self._shown = [folder.resolve() for folder in shown]
        self._most = largest_limits()
        self._sessions: dict[str, Session] = {}
        self._folder = state_folder()
        self._snapshots = SnapshotStore(self._folder)
        self.app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        box = "/v1/sandboxes/{name}"
        self.app.add_routes(
            [
                web.get("/v1/session", self._session),
                web.get("/v1/status", self._status),
                web.put("/v1/snapshots/{digest}", self._put_snapshot),
                web.post("/v1/sandboxes", self._create),
                web.delete(box, self._stop),
                web.post(box + "/execute", self._execute),
                web.post(box + "/snapshot", self._snapshot),
                web.post(box + "/restore/{digest}", self._restore),
                web.post(box + "/fork", self._fork),
                web.get(box + "/process", self._process),
                web.get(box + "/connect/{port}", self._connect),
                web.post(box + "/listen", self._listen),
                web.get(box + "/accept/{port}", self._accept),
            ]
        )

    async def close(self) -> None:
        """End all sessions, and with them their sandboxes."""
        await asyncio.gather(*(session.end() for session in self._sessions.values()))
        await self._pool.close()
        for file in self._folder.iterdir():
            file.unlink()
        self._folder.rmdir()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Let nobody through without the token, and answer failures with one line."""
        if not is_bearer(request.headers.get("Authorization"), self._token):
            return _error(401, "this host demands its token")
        try:
            return await handler(request)
        except SandboxGoneError as error:
            return _error(410, str(error))
        except (SandboxError, OSError) as error:
            return _error(409, str(error))
        except (msgspec.DecodeError, ValueError) as error:
            return _error(400, str(error))
        except web.HTTPException as error:
            return _error(error.status, error.reason)

    def _mine(self, request: web.Request) -> Session:
        if (session := self._sessions.get(request.headers.get(SESSION, ""))) is None:
            raise SandboxGoneError("the session has ended")
        return session

    def _lent(self, request: web.Request) -> Lent:
        return self._mine(request).find(request.match_info["name"])

    async def _session(self, request: web.Request) -> web.StreamResponse:
        socket = await _upgrade(request)
        session = Session(self._pool, self._most, self._shown)
        self._sessions[session.name] = session
        try:
            await socket.send_str(session.name)
            while (await socket.receive()).type in (WSMsgType.TEXT, WSMsgType.BINARY):
                pass
        finally:
            del self._sessions[session.name]
            await asyncio.shield(session.end())
        return socket

    async def _status(self, _request: web.Request) -> web.Response:
        held = sum(map(len, self._sessions.values()))
        return web.json_response({"sessions": len(self._sessions), "sandboxes": held})

    async def _put_snapshot(self, request: web.Request) -> web.Response:
        await self._snapshots.put(request.match_info["digest"], request.content.iter_any(), MAX_SNAPSHOT)
        return web.Response()

    async def _create(self, request: web.Request) -> web.Response:
        asked = decode(await request.read(), CreateRequest)
        snapshot = await self._snapshots.get(asked.snapshot)
        if asked.snapshot and snapshot is None:
            return _error(404, "send the snapshot first")
        lent = await self._mine(request).lend(asked.limits, [Path(path) for path in asked.readable], snapshot)
        return _created(lent)

    async def _fork(self, request: web.Request) -> web.Response:
        lent = self._lent(request)
        return _created(await self._mine(request).lend(lent.box.limits, lent.readable, await lent.box.snapshot()))

    async def _stop(self, request: web.Request) -> web.Response:
        await asyncio.shield(self._mine(request).give_back(request.match_info["name"]))
        return web.Response()

    async def _execute(self, request: web.Request) -> web.Response:
        asked = decode(await request.read(), ExecuteRequest)
        out, err = (Captured(max(1, min(keep, MAX_BODY))) for keep in asked.keep)
        seconds = min(asked.seconds, self._most.seconds)
        command = Command(asked.argv, seconds, asked.env, asked.stdin, asked.cwd or WORK)
        code, limit = await self._lent(request).box.execute(command, out, err)
        return web.Response(body=encode(Executed(code, limit, out.pack(), err.pack())))

    async def _snapshot(self, request: web.Request) -> web.Response:
        snapshot = await self._lent(request).box.snapshot()
        await self._snapshots.keep(snapshot)
        return web.Response(body=snapshot.archive)

    async def _restore(self, request: web.Request) -> web.Response:
        snapshot = await self._snapshots.get(request.match_info["digest"])
        if snapshot is None:
            return _error(404, "send the snapshot first")
        await self._lent(request).box.restore(snapshot)
        return web.Response()

    async def _process(self, request: web.Request) -> web.StreamResponse:
        lent = self._lent(request)
        socket = await _upgrade(request)
        asked = decode(await socket.receive_bytes(), ExecuteRequest)
        process = await lent.box.open_process(asked.argv, env=asked.env, cwd=asked.cwd or WORK)
        sending = asyncio.ensure_future(_send_output(process, socket))
        try:
            await _take_input(process, socket)
        finally:  # the process itself lives until its sandbox is stopped
            sending.cancel()
        return socket

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        streams = await self._lent(request).connect(int(request.match_info["port"]))
        socket = await _upgrade(request)
        await carry(socket, *streams)
        return socket

    async def _listen(self, request: web.Request) -> web.Response:
        return web.Response(body=encode(await self._lent(request).listen()))

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        streams = await self._lent(request).accept(int(request.match_info["port"]))
        socket = await _upgrade(request)
        await carry(socket, *streams)
        return socket


def largest_limits() -> Limits:
    """Bounds of one sandbox on this machine, whatever a client asks for: half of the memory, all cores, an hour."""
    half = psutil.virtual_memory().total // 2
    return Limits(half, 4096, os.cpu_count() or 1, half, 3600.0, MAX_BODY)


@contextlib.asynccontextmanager
async def serving(host: SandboxHost, address: str, port: int) -> AsyncIterator[int]:
    """Serve a host in this block; gives the port."""
    # A request whose client went away is cancelled, and with it the command or the wait for a sandbox.
    runner = web.AppRunner(host.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address, port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await host.close()
        await runner.cleanup()


async def _upgrade(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=MAX_BODY)
    await socket.prepare(request)
    return socket


async def _send_output(process: Process, socket: web.WebSocketResponse) -> None:
    """Send what a process writes, and then its exit code."""

    async def pump(stream: asyncio.StreamReader, mark: bytes) -> None:
        while data := await stream.read(1 << 16):
            await socket.send_bytes(mark + data)
        await socket.send_bytes(mark)

    with contextlib.suppress(ConnectionError, SandboxGoneError):
        outputs = asyncio.gather(pump(process.stdout, b"O"), pump(process.stderr, b"E"))
        code = await process.wait()
        await socket.send_bytes(b"X" + encode(code))
        await outputs


async def _take_input(process: Process, socket: web.WebSocketResponse) -> None:
    """Pass on what a client writes to a process, and its signals, until the client goes."""
    while (message := await socket.receive()).type is WSMsgType.BINARY:
        data: Any = message.data[1:]
        with contextlib.suppress(ConnectionError, SandboxGoneError):
            if message.data[:1] == b"K":
                await process.kill(decode(data, int))
            else:
                await process.write(data)


def _created(lent: Lent) -> web.Response:
    return web.Response(body=encode(Created(lent.box.name, lent.box.limits)))


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
