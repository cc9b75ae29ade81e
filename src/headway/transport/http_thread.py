"""An aiohttp application in a thread of a process that has no event loop of its own."""

import asyncio
import math
import selectors
import ssl
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import web

from headway.base.addresses import cannot_listen

T = TypeVar("T")


class PacedSelector(selectors.DefaultSelector):
    """Wakes its event loop for sockets at most `rate` times a second, after as many wake-ups without delay."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._pause, self._due = 1 / rate, 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        if timeout == 0 or not ready:  # the loop is at work, or a timer is due
            return ready
        now = time.monotonic()
        self._due = max(self._due, now - 1.0) + self._pause
        if self._due > now:
            time.sleep(self._due - now)
            ready = super().select(0)
        return ready


class HttpThread:
    """Serves `app` at `host`:`port` from a thread until closed; port 0 picks a free one.

    The thread wakes up for requests at most `wakes_per_second` times, and handles together what has come until then: of
    many small requests each takes less CPU time so, and an answer may come later by one such pause.
    """

    def __init__(
        self,
        app: web.Application,
        host: str,
        port: int,
        name: str,
        tls: ssl.SSLContext | None = None,
        wakes_per_second: float = math.inf,
    ) -> None:
        """Start serving. Raises HeadwayError when it cannot listen there."""
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self._loop = asyncio.SelectorEventLoop(PacedSelector(wakes_per_second))
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        try:
            self.port: int = self.call(self._start(host, port, tls))
        except OSError as error:
            self._end_loop()
            raise cannot_listen(host, port, error, "choose another address") from None

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
