"""Replies of all routes: JSON, server-sent events, and every failure as `{"error": {message, type, param}}`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType

import msgspec
from aiohttp import web

from headway.core.openai.answers import DONE, error_body, error_type, event
from headway.core.openai.requests import RequestError
from headway.core.protocol import FRAMES, ErrorBody, ErrorInfo, GenerateChunk
from headway.inference.errors import BusyError, FailedError, UpdateError
from headway.inference.tenants.admission import CrowdedError

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionError:
        # The client is gone: there is nobody to tell. Of anything but this, aiohttp would log a traceback.
        raise asyncio.CancelledError from None
    except Exception as error:
        status, body = describe_error(error)
        headers = {"Retry-After": str(error.retry_after)} if isinstance(error, BusyError) else None
        return json_response(body, status=status, headers=headers)


def describe_error(error: Exception) -> tuple[int, object]:
    """The status and the body of an error's response. Logs what nobody expected."""
    status, message, param, code = 500, str(error), None, None
    if isinstance(error, RequestError):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, BusyError):
        status = 429 if isinstance(error, CrowdedError) else 503
    elif isinstance(error, UpdateError):
        status = 409
    elif isinstance(error, web.HTTPException):
        status, message = error.status, error.text or error.reason
    elif not isinstance(error, FailedError):
        logger.exception("a request failed with an unexpected error", exc_info=error)
        message = f"internal error: {type(error).__name__}: {error}"
    return status, error_body(message, error_type(status), param, code=code)


class FrameStream:
    """A stream of messages in binary, each after its length. What fails before the first gets its own status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers={"Content-Type": FRAMES, "Cache-Control": "no-cache"})

    async def send(self, chunk: GenerateChunk) -> None:
        body = msgspec.msgpack.encode(chunk)
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(len(body).to_bytes(4, "little") + body)

    async def __aenter__(self) -> "FrameStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            if not isinstance(error, Exception) or not self.response.prepared or isinstance(error, ConnectionError):
                return False
            message = describe_error(error)[1]
            info = msgspec.convert(message, ErrorBody).error if isinstance(message, dict) else None
            await self.send(GenerateChunk("", [], error=info or ErrorInfo(str(error), "internal_error")))
        await self.response.write_eof()
        return True


class EventStream:
    """A stream of events whose response opens with the first, so that what fails before it still gets its own status.

    A failure after that is sent as an event, because the status has left already.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )

    async def send(self, body: object) -> None:
        await self._write(event(body))

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
            await self.send(describe_error(error)[1])
        await self._write(DONE)
        await self.response.write_eof()
        return True

    async def _write(self, data: bytes) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(data)
