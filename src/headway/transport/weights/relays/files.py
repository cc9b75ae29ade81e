"""An engine's files of one version while they arrive over HTTP, served on to engines that came later."""

import asyncio
import os
import ssl
import time
from io import FileIO
from pathlib import Path
from typing import Any

from aiohttp import web

from headway.transport.control.tokens import is_bearer
from headway.transport.http_thread import HttpThread
from headway.transport.tls import scheme

WAIT_SECONDS = 2.0
"""Time that a request waits for bytes which are still to come, before it is told to ask again."""
_LOOK_SECONDS = 0.01
NOT_YET = 503
"""Status of a request for bytes that are still on their way here."""


class ArrivingFiles:
    """The files of `version` in `folder`, as far as they have arrived. They stay readable when the folder is gone."""

    def __init__(self, version: int, folder: Path) -> None:
        self.version, self._folder = version, folder
        self.failed = False
        self._files: dict[str, tuple[FileIO, int]] = {}
        self._arrived: dict[str, int] = {}

    def start(self, name: str, size: int) -> None:
        """Make an empty file that `size` bytes will come for."""
        self._files[name] = (FileIO(self._folder / name, "w+"), size)
        self._arrived[name] = 0

    def append(self, name: str, data: bytes) -> None:
        file, rest = self._files[name][0], memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        self._arrived[name] += len(data)

    def arrived(self, name: str) -> int:
        return self._arrived.get(name, 0)

    def size(self, name: str) -> int | None:
        """Return the size that a file will have; None before it is known."""
        return self._files[name][1] if name in self._files else None

    def read(self, name: str, start: int, end: int) -> bytes:
        return os.pread(self._files[name][0].fileno(), end - start, start)


class FileRelay:
    """Serves what an engine has of its newest version, with the routes of the trainer, for the run's token."""

    def __init__(self, host: str, token: str, tls: ssl.SSLContext | None = None) -> None:
        self._held: ArrivingFiles | None = None
        self._server = HttpThread(self._app(token), host, 0, "weights relay", tls)
        self.url = f"{scheme(tls)}://{f'[{host}]' if ':' in host else host}:{self._server.port}"

    def hold(self, version: int, folder: Path) -> tuple[ArrivingFiles, bool]:
        """Take up a version in place of the one before. Also tells if this is another attempt at the same one."""
        again = self._held is not None and self._held.version == version
        self._held = ArrivingFiles(version, folder)
        return self._held, again

    def drop(self) -> None:
        if self._held is not None:
            self._held.failed = True

    def close(self) -> None:
        self._server.close()

    def _app(self, token: str) -> web.Application:
        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            if not is_bearer(request.headers.get("Authorization"), token):
                raise web.HTTPUnauthorized(reason="these weights demand the run's token")
            response: web.StreamResponse = await handler(request)
            return response

        app = web.Application(middlewares=[guard])
        route = r"/v1/versions/{version:\d{1,9}}/{file:manifest\.json|rank_\d{5}\.safetensors}"
        app.add_routes([web.get(route + "/size", self._size), web.get(route, self._content)])
        return app

    async def _size(self, request: web.Request) -> web.Response:
        name = request.match_info["file"]
        held = await self._wait_for(request, lambda held: held.size(name) is not None)
        return web.json_response(held.size(name))

    async def _content(self, request: web.Request) -> web.Response:
        name, span = request.match_info["file"], request.http_range
        if span.start is None or span.stop is None or not 0 <= span.start < span.stop:
            raise web.HTTPRequestRangeNotSatisfiable(reason="ask for a range of bytes")
        held = await self._wait_for(request, lambda held: held.arrived(name) >= span.stop)
        data = await asyncio.to_thread(held.read, name, span.start, span.stop)
        return web.Response(body=data, status=206)

    async def _wait_for(self, request: web.Request, ready: Any) -> ArrivingFiles:
        held, deadline = self._held, time.monotonic() + WAIT_SECONDS
        while held is not None and held.version == int(request.match_info["version"]) and not held.failed:
            if ready(held):
                return held
            if time.monotonic() > deadline:
                raise web.HTTPServiceUnavailable(reason="these bytes are still on their way here")
            await asyncio.sleep(_LOOK_SECONDS)
        raise web.HTTPNotFound(reason="this version is not held here")
