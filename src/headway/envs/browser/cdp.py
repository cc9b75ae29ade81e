"""The Chrome DevTools Protocol over a pipe: commands with answers, and events of sessions."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from headway.base.errors import HeadwayError
from headway.sandboxes.sandbox import Process

logger = logging.getLogger(__name__)

Event = Callable[[str, dict[str, Any]], None]
"""A function of an event's method and parameters."""

CALL_SECONDS = 10.0
START_SECONDS = 60.0
"""How long a browser that was just started may take for its first answer."""
_STDERR_KEPT = 2000


class BrowserGoneError(HeadwayError):
    """The browser ended, or was ended, while it was in use."""


class CommandError(Exception):
    """The browser refused a command; the message is its own."""


class Connection:
    """The pipes of one browser: messages are JSON, and a zero byte ends each."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listeners: dict[str, Event] = {}
        self._said = b""
        self._reading = [asyncio.create_task(work) for work in (self._read(), self._keep_stderr(), self._watch())]
        self.closed = False

    async def greet(self) -> None:
        """Wait for the browser's first answer. Raises HeadwayError where none comes."""
        try:
            await self.call("Browser.getVersion", seconds=START_SECONDS)
        except TimeoutError:
            raise HeadwayError(f"Chromium did not answer within {START_SECONDS:g} s") from None

    async def call(
        self, method: str, session: str | None = None, /, *, seconds: float | None = None, **params: Any
    ) -> dict[str, Any]:
        """Send a command. Raises CommandError, TimeoutError after `seconds` (CALL_SECONDS), and BrowserGoneError."""
        if self.closed:
            raise BrowserGoneError(self.crash_report())
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds or CALL_SECONDS):
                await self._process.write(msgspec.json.encode(message) + b"\0")
                answer = await future
        except ConnectionError as error:
            raise BrowserGoneError(self.crash_report()) from error
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise CommandError(str(answer["error"].get("message", answer["error"])))
        return dict(answer.get("result", {}))

    def listen(self, session: str, listener: Event) -> None:
        self._listeners[session] = listener

    def forget(self, session: str) -> None:
        self._listeners.pop(session, None)

    def crash_report(self) -> str:
        """Say that the browser ended, with the last of what it wrote."""
        lines = [line for line in self._said.decode(errors="replace").splitlines() if "dbus/" not in line]
        code = self._process.poll()
        ended = "Chromium ended" if code is None else f"Chromium ended with exit code {code}"
        return ended + (f"; its last output: {' | '.join(lines)[-600:]}" if lines else "")

    async def close(self) -> None:
        self._lost()
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def _read(self) -> None:
        kept = b""
        try:
            while chunk := await self._process.stdout.read(1 << 16):
                *messages, kept = (kept + chunk).split(b"\0")
                for message in messages:
                    self._received(msgspec.json.decode(message))
        finally:
            self._lost()

    def _received(self, message: dict[str, Any]) -> None:
        if "id" in message:
            future = self._waiting.get(message["id"])
            if future is not None and not future.done():
                future.set_result(message)
        elif listener := self._listeners.get(message.get("sessionId", "")):
            listener(message["method"], message.get("params", {}))

    def _lost(self) -> None:
        self.closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(BrowserGoneError(self.crash_report()))

    async def _watch(self) -> None:
        """Notice the end of the browser itself: processes that it started may hold its pipes open for longer."""
        await self._process.wait()
        self._lost()

    async def _keep_stderr(self) -> None:
        while chunk := await self._process.stderr.read(1 << 16):
            self._said = (self._said + chunk)[-_STDERR_KEPT:]
