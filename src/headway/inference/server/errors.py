"""Every failure leaves as `{"error": {message, type, param}}` with a fitting status; the server goes on."""

import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from headway.core.protocol import ErrorBody, ErrorInfo
from headway.inference.engine import BusyError, FailedError, RequestError, UpdateError

logger = logging.getLogger("headway.server")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 503: "overloaded_error"}


def error_info(error: Exception) -> tuple[int, ErrorInfo, dict[str, str]]:
    """Status, body and headers of an error."""
    if isinstance(error, RequestError):
        return _info(error.status, str(error), error.param)
    if isinstance(error, BusyError):
        status, info, _ = _info(503, str(error))
        return status, info, {"Retry-After": str(error.retry_after)}
    if isinstance(error, UpdateError):
        return _info(409, str(error))
    if isinstance(error, FailedError):
        return _info(500, str(error))
    if isinstance(error, web.HTTPException):
        return _info(error.status, error.text or error.reason)
    logger.exception("a request failed", exc_info=error)
    return _info(500, f"internal error: {type(error).__name__}: {error}")


def _info(status: int, message: str, param: str | None = None) -> tuple[int, ErrorInfo, dict[str, str]]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")
    return status, ErrorInfo(message, kind, param), {}


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Exception as error:
        status, info, headers = error_info(error)
        return json_response(ErrorBody(info), status=status, headers=headers)


def json_response(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")
