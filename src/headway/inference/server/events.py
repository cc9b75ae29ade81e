"""Server-sent events, as OpenAI's clients read them."""

from types import TracebackType

import msgspec
from aiohttp import web

from headway.core.protocol import ErrorBody
from headway.inference.server.errors import error_info


class EventStream:
    """Opens the response at the first event, so that what fails before it still gets its own status.

    A failure after that is sent as an event, because the status has left already.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )

    async def send(self, body: object) -> None:
        await self._write(b"data: " + msgspec.json.encode(body) + b"\n\n")

    async def __aenter__(self) -> "EventStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and not (isinstance(error, Exception) and self.response.prepared):
            return False
        if isinstance(error, ConnectionError):
            return False
        if error is not None:
            await self.send(ErrorBody(error_info(error)[1]))
        await self._write(b"data: [DONE]\n\n")
        await self.response.write_eof()
        return True

    async def _write(self, data: bytes) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(data)
