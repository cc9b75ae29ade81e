"""An aiohttp application in a thread of a process that has no event loop of its own."""

import asyncio
import ssl
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import web

from headway.core.errors import HeadwayError

T = TypeVar("T")


class HttpThread:
    """Serves `app` at `host`:`port` from a thread until closed; port 0 picks a free one."""

    def __init__(
        self, app: web.Application, host: str, port: int, name: str, tls: ssl.SSLContext | None = None
    ) -> None:
        """Start serving. Raises HeadwayError when it cannot listen there."""
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        try:
            self.port: int = self.call(self._start(host, port, tls))
        except OSError as error:
            self._end_loop()
            raise HeadwayError(f"cannot listen at {host}:{port}: {error.strerror or error}; choose another") from None

    async def _start(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, ssl_context=tls).start()
        return int(self._runner.addresses[0][1])

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the thread's event loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self.call(self._runner.cleanup())
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
