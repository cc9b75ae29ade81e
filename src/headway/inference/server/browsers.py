"""Refuse requests that web pages make in a user's browser: a server on loopback is for programs of this machine."""

from urllib.parse import urlsplit

from aiohttp import web

from headway.base.processes import host_name, is_loopback
from headway.core.openai.requests import RequestError
from headway.inference.server.responses import Handler


@web.middleware
async def loopback_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let requests through whose Host, and Origin where there is one, are loopback.

    A site elsewhere may point its own name at loopback (DNS rebinding), or post to loopback from its page.
    """
    if not is_loopback(host_name(request.host)):
        raise RequestError("the Host header is not this server's: use its loopback address", status=403)
    origin = request.headers.get("Origin")
    if origin is not None and not is_loopback(_origin_host(origin)):
        raise RequestError(f"pages of {origin} may not use this server", status=403)
    return await handler(request)


def _origin_host(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""
