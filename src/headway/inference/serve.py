"""Run a server: bind, load, serve, finish the requests in flight, exit."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from headway.config.inference import ServeSettings
from headway.core.errors import HeadwayError, UsageError
from headway.core.files import write_atomic
from headway.core.processes import is_loopback
from headway.core.runs import RunPaths
from headway.inference.engine import Engine, UpdateError
from headway.inference.server import ServerContext, build_app
from headway.models.tiny import resolve_model
from headway.monitor.logs import SUPERVISED
from headway.rendering.load import load_renderer

logger = logging.getLogger(__name__)

_GRACE = 10.0
"""Seconds that requests in flight get to end after a signal."""
_SWITCH_SECONDS = 5e-4


async def serve(settings: ServeSettings, run: RunPaths | None = None, name: str = "inference") -> None:
    """Serve until SIGTERM or SIGINT. With `run`, be one of its engines, called `name`."""
    # The engine's thread releases the interpreter at every operation and must get it back soon from the event loop.
    sys.setswitchinterval(_SWITCH_SECONDS)
    token = find_token(run)
    check_address(settings.inference.host, token)
    folder = resolve_model(settings.model.path, settings.model.family)
    renderer = load_renderer(folder, settings.model.renderer, settings.model.family)
    context = ServerContext(renderer, Path(settings.model.path).name, token)
    runner = web.AppRunner(build_app(context), handler_cancellation=True, shutdown_timeout=_GRACE, access_log=None)
    await runner.setup()
    stop = _stop_event()
    deaths: list[str] = []

    def on_death(reason: str) -> None:
        deaths.append(reason)
        stop.set()

    try:
        url = await _bind(runner, settings.inference.host, settings.inference.port)
        engine = await asyncio.to_thread(load_engine, settings, folder, on_death)
        await engine.start()
        await _catch_up(engine, run)
        context.loaded = engine
        with registered(run, name, url):
            _announce(f"serving {settings.model.path} at {url} (version {engine.weights().version})")
            await stop.wait()
            logger.info("stopping: requests in flight have %.0f s to finish", _GRACE)
    finally:
        await runner.cleanup()
        if context.loaded is not None:
            await context.loaded.close()
    if deaths:
        raise HeadwayError(deaths[0])


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


def load_engine(settings: ServeSettings, folder: Path, on_death: Callable[[str], None] | None = None) -> Engine:
    """The engine that the settings ask for. `on_death` is called when it must be restarted."""
    if wants_vllm(settings):
        from headway.inference.vllm.load import load_vllm

        return load_vllm(settings, folder, on_death)
    from headway.inference.embedded.load import load_service

    return load_service(settings, folder)


def find_token(run: RunPaths | None) -> str | None:
    """The bearer token of admin routes: HEADWAY_TOKEN, or the run's; None where there is neither."""
    if token := os.environ.get("HEADWAY_TOKEN", "").strip():
        return token
    if run is not None and (run.control / "token").is_file():
        return (run.control / "token").read_text().strip() or None
    return None


def check_address(host: str, token: str | None) -> None:
    """Raises UsageError where a server that others can reach has no token."""
    if token is None and not is_loopback(host):
        raise UsageError(f"inference.host {host} can be reached by others: set HEADWAY_TOKEN, or use 127.0.0.1")


@contextmanager
def registered(run: RunPaths | None, name: str, url: str) -> Iterator[None]:
    """Keep the engine in the run's list meanwhile, where its orchestrator finds it."""
    if run is None:
        yield
        return
    path = run.control / "engines" / f"{name}.json"
    write_atomic(path, msgspec.json.encode({"url": url, "pid": os.getpid()}))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


async def _bind(runner: web.AppRunner, host: str, port: int) -> str:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise HeadwayError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; choose another --port"
        ) from None
    bound = runner.addresses[0]
    shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
    return f"http://{shown}:{bound[1]}"


async def _catch_up(engine: Engine, run: RunPaths | None) -> None:
    """Load the run's latest weights, where it has some. The orchestrator sends later ones."""
    if run is None:
        return
    from headway.transport.weights.announcements import latest

    update = latest(run)
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
