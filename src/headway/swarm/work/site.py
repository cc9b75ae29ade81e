"""A server of the swarm: encrypted wherever others can reach it."""

import asyncio
import signal
import ssl
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from aiohttp import web

from headway.base.errors import STOPPED, HeadwayError, UsageError
from headway.base.processes import is_loopback
from headway.config.shared import TlsSettings
from headway.transport.tls import scheme, server_context


def swarm_tls(settings: TlsSettings, host: str) -> ssl.SSLContext | None:
    """Return what a server at `host` encrypts with; None on loopback. Raises UsageError where others could reach a
    server that does not encrypt."""
    tls = server_context(settings, host)
    if tls is None and not is_loopback(host):
        raise UsageError(f"--host {host} can be reached by others: a swarm needs a certificate there (docs/swarm.md)")
    return tls


async def serve_while(
    app: web.Application, host: str, port: int, tls: ssl.SSLContext | None, work: Coroutine[Any, Any, None], name: str
) -> None:
    """Serve `app` until `work` ends; print the address on the way. Raises HeadwayError where it can't listen there."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
    await runner.setup()
    task = asyncio.ensure_future(work)
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        shown = f"[{host}]" if ":" in host else host
        print(f"{name}: {scheme(tls)}://{shown}:{runner.addresses[0][1]}", flush=True)
        await task
    except OSError as error:
        raise HeadwayError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; choose another --port"
        ) from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()


async def until_stopped(work: Coroutine[Any, Any, None]) -> int:
    """Run `work` until it ends (0), or until SIGINT or SIGTERM (130). Returns the exit code."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        await task
        return 0
    return STOPPED
