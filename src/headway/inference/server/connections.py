"""Connections that ask for nothing: opened and left alone, or with a request whose headers never end."""

import asyncio
import time
from typing import Any
from weakref import WeakSet

from aiohttp import web

IN_FLIGHT = web.AppKey("in_flight", set)
"""Transports of the requests that are being answered."""
ANSWERED = web.AppKey("answered", WeakSet)
"""Transports of the requests that were answered since idle connections were last looked for."""
_IDLE_SECONDS = 90.0
"""Longer than a client keeps a connection for its next request (75 s in aiohttp)."""
_PERIOD = 10.0


@web.middleware
async def count_in_flight(request: web.Request, handler: Any) -> web.StreamResponse:
    transports: set[object] = request.app[IN_FLIGHT]
    transport = request.transport
    transports.add(transport)
    try:
        response: web.StreamResponse = await handler(request)
        return response
    finally:
        transports.discard(transport)
        request.app[ANSWERED].add(transport)


class OpenConnections:
    """The connections of a server. aiohttp limits the time between requests, but not the time of a first one."""

    def __init__(self, runner: web.AppRunner, idle_seconds: float = _IDLE_SECONDS) -> None:
        self._runner = runner
        self._idle_seconds = idle_seconds
        self._idle_since: dict[object, float] = {}

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD)
            self.close_idle(time.monotonic())

    def close_idle(self, now: float) -> int:
        """Close the connections that were idle for too long; return their number."""
        server, answered = self._runner.server, self._runner.app[ANSWERED]
        assert server is not None
        # Short requests are rarely seen in flight: a connection with one since the last look was not idle.
        used = {*self._runner.app[IN_FLIGHT], *answered}
        answered.clear()
        idle = [c for c in server.connections if c.transport is not None and c.transport not in used]
        self._idle_since = {c: self._idle_since.get(c, now) for c in idle}
        closed = [c for c in idle if now - self._idle_since[c] >= self._idle_seconds]
        for connection in closed:
            connection.force_close()
        return len(closed)
