"""The dashboard's server: loopback by default, read-only, and strict about what a browser may do with it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from headway.base.addresses import cannot_listen
from headway.base.errors import HeadwayError
from headway.base.processes import host_name
from headway.monitor.dashboard import api
from headway.monitor.dashboard.api import add_routes
from headway.monitor.dashboard.catalog import Catalog

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Routes = Mapping[str, api.Handler]
NO_MORE: Routes = {}


def make_app(outputs: Path, host: str = "127.0.0.1", routes: Routes = NO_MORE) -> web.Application:
    """Make the application over the runs in `outputs`, meant to be bound to `host`.

    `routes` are those of pages whose data come from above this floor, by their paths below that of a run.
    """
    app = web.Application(middlewares=[_check_host(host)])
    app.on_response_prepare.append(_harden)
    add_routes(app, Catalog(outputs), routes)
    for name, (body, kind) in _static_files().items():
        app.router.add_get("/" if name == "index.html" else f"/static/{name}", _static(body, kind))
    return app


def serve(
    outputs: Path,
    host: str = "127.0.0.1",
    port: int = 8400,
    ready: Callable[[str], None] = print,
    routes: Routes = NO_MORE,
) -> None:
    """Serve until interrupted. Raises HeadwayError when the port is taken."""
    asyncio.run(_serve(make_app(outputs, host, routes), host, port, ready))


def start_in_thread(outputs: Path, port: int = 0, routes: Routes = NO_MORE) -> str:
    """Serve in a thread, on loopback, until this process ends. Returns the dashboard's URL.

    Raises HeadwayError when the port is taken.
    """
    url: Future[str] = Future()

    def body() -> None:
        try:
            serve(outputs, port=port, ready=url.set_result, routes=routes)
        except HeadwayError as error:
            url.set_exception(error)

    threading.Thread(target=body, name="dashboard", daemon=True).start()
    return url.result()


async def _serve(app: web.Application, host: str, port: int, ready: Callable[[str], None]) -> None:
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise cannot_listen(host, port, error, "choose another --port, or 0 for any free one") from None
    bound = runner.addresses[0][1]
    ready(f"http://{f'[{host}]' if ':' in host else host}:{bound}/")
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _check_host(host: str) -> Middleware:
    """Refuse requests by a host name that is not ours: a site elsewhere may point its own name at loopback."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if host in LOOPBACK and host_name(request.host) not in LOOPBACK:
            raise web.HTTPForbidden(text="open this dashboard by its loopback address")
        return await handler(request)

    return guard


async def _harden(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _static(body: bytes, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        response = web.Response(body=body, content_type=kind, charset="utf-8", headers={"Cache-Control": "no-cache"})
        response.enable_compression()
        return response

    return handler


def _static_files() -> dict[str, tuple[bytes, str]]:
    """Read every file below static/ by its path. Only these are served, from memory."""
    out: dict[str, tuple[bytes, str]] = {}

    def walk(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                walk(entry, f"{prefix}{entry.name}/")
            elif (kind := TYPES.get(Path(entry.name).suffix)) is not None:
                out[prefix + entry.name] = (entry.read_bytes(), kind)

    walk(files(__package__) / "static", "")
    return out
