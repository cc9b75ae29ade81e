"""Run a server: bind, load, serve, hand over or finish the requests in flight, exit."""

import asyncio
import gc
import logging
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from headway.base.addresses import cannot_listen, own_address
from headway.base.errors import HeadwayError, UsageError
from headway.base.processes import is_loopback
from headway.config.inference import ServeSettings
from headway.core.runs import RunPaths
from headway.inference.engine import Engine
from headway.inference.errors import UpdateError
from headway.inference.server import ServerContext, build_app
from headway.inference.server.connections import OpenConnections
from headway.inference.tenants.grants import Grants
from headway.inference.tenants.view import HostAddress
from headway.models.tiny import resolve_model
from headway.monitor.logs import SUPERVISED
from headway.rendering.load import load_renderer
from headway.rendering.tokenizer import tokenizer_fingerprint
from headway.transport.control.client import ControlClient, JoinedControl
from headway.transport.control.folder import FolderControl
from headway.transport.control.tokens import find_token
from headway.transport.http_client import check_trusted
from headway.transport.tenants.tenancy import ADDRESS_FILE
from headway.transport.tls import scheme, server_context

logger = logging.getLogger(__name__)

_GRACE = 10.0
"""Seconds that requests in flight get to end after a signal."""
_SWITCH_SECONDS = 5e-4
_LOOK_SECONDS = 1.0


def settle() -> None:
    """Take what was made until now out of garbage collections: all tokens wait for them, half a second with vLLM."""
    gc.collect()
    gc.freeze()


async def serve(
    settings: ServeSettings, run: RunPaths | None = None, name: str = "inference", client: ControlClient | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. With `run`, be one of its engines, called `name`.

    With `client` the run is on another host, `run` is this host's own folder, and the end of the run ends this, too.
    """
    # The engine's thread releases the interpreter at every operation and must get it back soon from the event loop.
    sys.setswitchinterval(_SWITCH_SECONDS)
    token = find_token(run)
    _check(settings, token)
    tls = server_context(settings.tls, settings.inference.host)
    folder = resolve_model(settings.model.path, settings.model.family)
    context = _context(settings, folder, token, run)
    app = build_app(context, settings.inference.host)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_GRACE, access_log=None)
    await runner.setup()
    watch = asyncio.create_task(OpenConnections(runner).watch())
    stop = _stop_event()
    deaths: list[str] = []

    def on_death(reason: str) -> None:
        deaths.append(reason)
        stop.set()

    try:
        url = await _bind(runner, settings.inference.host, settings.inference.port, tls)
        context.url = url if client is None else _reachable(url, client)
        engine = await asyncio.to_thread(load_engine, settings, folder, on_death, token or "")
        await _bring_up(engine, run, client)
        context.loaded = engine
        async with registered(run, name, url, client, stop):
            _announce(f"serving {settings.model.path} at {url} (version {engine.weights().version})")
            await stop.wait()
        logger.info(
            "stopping: %d requests are handed over with the tokens they have; others have %.0f s to finish",
            len(context.generating),
            _GRACE,
        )
        context.leave()
    finally:
        watch.cancel()
        await runner.cleanup()
        if context.loaded is not None:
            await context.loaded.close()
    if deaths:
        raise HeadwayError(deaths[0])


def _check(settings: ServeSettings, token: str | None) -> None:
    """Raise UsageError where a server must not be so: open to others, or in a role, without what that needs."""
    check_address(settings.inference.host, token)
    check_role(settings, token)
    check_tenants(settings, token)


async def _bring_up(engine: Engine, run: RunPaths | None, client: ControlClient | None) -> None:
    """Start an engine, bring the run's newest weights to it, and free it of garbage collections."""
    await engine.start()
    await _catch_up(engine, run, client)
    settle()


def _context(settings: ServeSettings, folder: Path, token: str | None, run: RunPaths | None) -> ServerContext:
    return ServerContext(
        load_renderer(folder, settings.model.renderer, settings.model.family),
        settings.inference.served_model_name or Path(settings.model.path).name,
        token,
        folder=str(folder.resolve()),
        tokenizer=tokenizer_fingerprint(folder),
        role=settings.inference.role,
        max_waiting=settings.inference.max_waiting,
        grants=Grants(closed=settings.inference.tenants),
        host=None if run is None else host_of(run, token),
    )


def _announce(line: str) -> None:
    """Print the line for a person at the terminal; in a supervised process, log it."""
    if SUPERVISED in os.environ:
        logger.info(line)
    else:
        print(line, flush=True)


def wants_vllm(settings: ServeSettings) -> bool:
    """Tell whether the settings ask for vLLM; "auto" does where it is installed for GPUs and there is one."""
    if settings.inference.engine == "auto":
        from headway.inference.vllm.load import is_default

        return is_default() and settings.placement.device != "cpu"
    return settings.inference.engine == "vllm"


def load_engine(
    settings: ServeSettings, folder: Path, on_death: Callable[[str], None] | None = None, secret: str = ""
) -> Engine:
    """The engine that the settings ask for. `on_death` is called when it must be restarted; `secret` is the run's."""
    if wants_vllm(settings):
        from headway.inference.vllm.load import load_vllm

        return load_vllm(settings, folder, on_death)
    from headway.inference.embedded.load import load_service

    return load_service(settings, folder, on_death, secret)


def check_address(host: str, token: str | None) -> None:
    """Raises UsageError where a server that others can reach has no token."""
    if token is None and not is_loopback(host):
        raise UsageError(f"inference.host {host} can be reached by others: set HEADWAY_TOKEN, or use 127.0.0.1")


def check_tenants(settings: ServeSettings, token: str | None) -> None:
    """Raises UsageError where nobody could name the tenants that a server waits for."""
    if settings.inference.tenants and token is None:
        raise UsageError("inference.tenants: whoever names the tenants needs the server's token; set HEADWAY_TOKEN")


def check_role(settings: ServeSettings, token: str | None) -> None:
    """Raises UsageError where a server could not do its part of a request."""
    if settings.inference.role == "both":
        return
    if token is None:
        raise UsageError(f"inference.role {settings.inference.role} moves KV between engines: set HEADWAY_TOKEN in all")
    if wants_vllm(settings):
        from headway.inference.vllm.transfers import check_transfers

        check_transfers(settings)


def host_of(run: RunPaths, token: str | None) -> HostAddress | None:
    """Find the host whose engine this is; None where `run` is an ordinary run."""
    try:
        url = (run.control / ADDRESS_FILE).read_text().strip()
    except FileNotFoundError:
        return None
    return HostAddress(url, token or "")


@asynccontextmanager
async def registered(
    run: RunPaths | None, name: str, url: str, client: ControlClient | None, stop: asyncio.Event
) -> AsyncIterator[None]:
    """Keep the engine in the run's list meanwhile, where its orchestrator finds it; `stop` is set when the run ends."""
    if run is None:
        yield
    elif client is None:
        control = FolderControl(run)
        control.add_engine(name, url, os.getpid())
        try:
            yield
        finally:
            control.remove_engine(name)
    else:
        url = _reachable(url, client)
        if url.startswith("https:"):
            await asyncio.to_thread(check_trusted, url)
        joined = await asyncio.to_thread(JoinedControl, client, run, "engine", name, url)
        watch = asyncio.create_task(_stop_with_run(joined, stop))
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.to_thread(joined.close)


async def _stop_with_run(joined: JoinedControl, stop: asyncio.Event) -> None:
    while True:
        if joined.ended():
            logger.info("the run has ended")
            stop.set()
            return
        await asyncio.sleep(_LOOK_SECONDS)


def _reachable(url: str, client: ControlClient) -> str:
    """Name an address of this host that the run's others reach, in place of one that stands for all of them."""
    return url.replace("//0.0.0.0:", f"//{own_address(client.http.host)}:")


async def _bind(runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext | None) -> str:
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
    except OSError as error:
        raise cannot_listen(host, port, error) from None
    bound = runner.addresses[0]
    # A certificate may hold the name that was given, and not the address that it stands for.
    name = bound[0] if tls is None else host
    shown = f"[{name}]" if ":" in name else name
    return f"{scheme(tls)}://{shown}:{bound[1]}"


async def _catch_up(engine: Engine, run: RunPaths | None, client: ControlClient | None) -> None:
    """Load the run's latest weights, where it has some. The orchestrator sends later ones."""
    if run is None:
        return
    source = FolderControl(run) if client is None else client
    update = await asyncio.to_thread(source.latest)
    if update is None:
        return
    try:
        await engine.update(update)
    except UpdateError as error:
        logger.warning("the run's latest weights were refused, so the engine serves the model's own: %s", error)


def _stop_event() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; a second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask() -> None:
        if stop.is_set():
            sys.stderr.write("headway: stopped at once\n")
            os._exit(130)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    return stop
