"""Routes that serve versions, for a source and for a relay: notice, manifest, and shards with ranges."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

from aiohttp import web

from headway.swarm.messages.canonical import InvalidMessageError, encode
from headway.swarm.messages.limits import Limits, TooManyRequestsError
from headway.swarm.messages.signing import claimed_key, verify
from headway.swarm.weights.store import ShardStore

CHUNK = 1 << 16
WAIT_SECONDS = 20.0
"""Time that a request for a shard which is still on its way is held, before it is answered with 425."""
_LOOK_SECONDS = 0.05
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NotYetError(InvalidMessageError):
    """A shard will be here, and is not yet."""


class Bandwidth:
    """Bounds the bytes a second that all requests together are answered with; None bounds nothing."""

    def __init__(self, per_second: float | None) -> None:
        self._per_second, self._free_at = per_second, 0.0
        self.sent = 0

    @property
    def bounded(self) -> bool:
        return self._per_second is not None

    async def take(self, count: int) -> None:
        """Wait until `count` more bytes may be sent."""
        self.sent += count
        if self._per_second is None:
            return
        now = time.monotonic()
        begins = max(now, self._free_at)
        self._free_at = begins + count / self._per_second
        await asyncio.sleep(max(0.0, begins - now))


class Guard:
    """Lets nobody through whose request is not signed, and nobody too often. Failures are one line of text.

    Requests with a body are verified where that has been read; the limits come before.
    """

    def __init__(self, per_key: Limits, per_address: Limits) -> None:
        self._per_key, self._per_address = per_key, per_address

    @web.middleware
    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._admit(request)
            return await handler(request)
        except TooManyRequestsError as error:
            return web.Response(status=HTTPStatus.TOO_MANY_REQUESTS, text=str(error), headers={"Retry-After": "1"})
        except NotYetError as error:
            return web.Response(status=HTTPStatus.TOO_EARLY, text=str(error))
        except InvalidMessageError as error:
            return web.Response(status=HTTPStatus.BAD_REQUEST, text=str(error))
        except FileNotFoundError:
            return web.Response(status=HTTPStatus.NOT_FOUND, text="this version is not held here")

    def _admit(self, request: web.Request) -> None:
        now = time.monotonic()
        # Addresses first: keys cost nothing, so that a flood of them must not fill the memory for keys.
        if not self._per_address.take(request.remote or "", now):
            raise TooManyRequestsError("too many requests of this address; try again later")
        header = request.headers.get("Authorization")
        if request.method == "GET":
            verify(header, request.method, request.path)
        if not self._per_key.take(claimed_key(header), now):
            raise TooManyRequestsError("too many requests of this key; try again later")


def version_routes(store: ShardStore, bandwidth: Bandwidth) -> list[web.RouteDef]:
    """Serve the versions of a store."""

    async def notice(_request: web.Request) -> web.Response:
        return web.Response(body=encode(store.notice()))

    async def manifest(request: web.Request) -> web.Response:
        version = int(request.match_info["version"])
        await _announced(store, version)
        return web.Response(body=store.signed_manifest(version))

    async def shard(request: web.Request) -> web.StreamResponse:
        version, index = int(request.match_info["version"]), int(request.match_info["index"])
        return await _send(request, await _arrived(store, version, index), bandwidth)

    route = r"/v1/versions/{version:\d{1,9}}"
    return [
        web.get("/v1/versions", notice),
        web.get(route + "/manifest", manifest),
        web.get(route + r"/shards/{index:\d{1,9}}", shard),
    ]


async def _announced(store: ShardStore, version: int) -> None:
    """Wait a little for the manifest of a version that is newer than all that are here: others may know it earlier."""
    give_up = time.monotonic() + WAIT_SECONDS
    while version > store.notice().newest >= 0 and time.monotonic() < give_up:  # noqa: ASYNC110 - files of a folder
        await asyncio.sleep(_LOOK_SECONDS)


async def _arrived(store: ShardStore, version: int, index: int) -> Path:
    """Wait a little for a shard that is on its way here, or of a version that is newer than all that are here. Raises
    FileNotFoundError, and NotYetError where it takes longer."""
    path, give_up = store.shard(version, index), time.monotonic() + WAIT_SECONDS
    while not path.is_file():
        manifest = store.manifest(version)
        gone = version <= store.notice().newest if manifest is None else index >= len(manifest.hashes)
        if gone:
            raise FileNotFoundError
        if time.monotonic() > give_up:
            raise NotYetError("this shard is still on its way here")
        await asyncio.sleep(_LOOK_SECONDS)
    return path


async def _send(request: web.Request, path: Path, bandwidth: Bandwidth) -> web.StreamResponse:
    """Send a file, or the range of it that is asked for, no faster than `bandwidth` allows."""
    data = path.read_bytes()
    try:
        span = request.http_range
    except ValueError:
        raise web.HTTPRequestRangeNotSatisfiable from None
    part = memoryview(data)[span]
    response = web.StreamResponse(status=200 if len(part) == len(data) else 206)
    response.content_length = len(part)
    if response.status == HTTPStatus.PARTIAL_CONTENT:
        begin = span.indices(len(data))[0]
        response.headers["Content-Range"] = f"bytes {begin}-{begin + len(part) - 1}/{len(data)}"
    with suppress(ConnectionError):  # whoever asked is gone, and may ask again
        await response.prepare(request)
        # Pieces are for the bound on the rate; without one, they only cost time.
        size = CHUNK if bandwidth.bounded else max(1, len(part))
        for start in range(0, len(part), size):
            chunk = part[start : start + size]
            await bandwidth.take(len(chunk))
            await response.write(chunk)
        await response.write_eof()
    return response
