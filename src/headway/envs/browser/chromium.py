"""One Chromium for all episodes of a worker: in a sandbox, without a network, a browser context for each page.

A context may serve several episodes one after the other, cleared in between: making one takes most of a short
episode's time.
"""

import asyncio
import contextlib
import logging
import shlex
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.base.errors import HeadwayError
from headway.envs.browser.cdp import START_SECONDS, BrowserGoneError, CommandError, Connection
from headway.envs.browser.page import Page
from headway.envs.browser.site import Site
from headway.sandboxes.pool import SandboxPool
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import Limits

logger = logging.getLogger(__name__)

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_REAL = {"/usr/bin/chromium": "/usr/lib/chromium/chromium"}
"""Debian's launcher is a script that reads files which a sandbox does not have."""

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # Chromium's own needs namespaces or root's rights, which a sandbox of ours does not grant
    "--remote-debugging-pipe",
    "--block-new-web-contents",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-component-update",
    "--disable-breakpad",
    "--disable-extensions",
    "--disable-sync",
    "--disable-features=HttpsUpgrades,HttpsFirstBalancedModeAutoEnable,Translate,OptimizationHints,MediaRouter",
    "--no-first-run",
    "--no-default-browser-check",
    "--mute-audio",
    "--password-store=basic",
    # Requests are answered before any name is looked up. These hold for whatever the browser itself may ask for.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=socks5://127.0.0.1:9",
    "--proxy-bypass-list=<-loopback>",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy",
)
_FONTS = b"<fontconfig><dir>/usr/share/fonts</dir><cachedir>/tmp/fontconfig</cachedir></fontconfig>"


def find_chromium(path: str | None = None) -> str:
    """Return the program's path. Raises HeadwayError, with what to do, where there is none."""
    found = next((place for name in ([path] if path else NAMES) if (place := shutil.which(name))), None)
    if found is None:
        sought = f'there is no program "{path}"' if path else f"none of {', '.join(NAMES)} is in PATH"
        raise HeadwayError(
            f"browser: no Chromium was found: {sought}. Install it (apt-get install chromium), or name the program "
            'with args = { chromium = "/path/to/chrome" }'
        )
    real = _REAL.get(found, found)
    return real if Path(real).exists() else found


@dataclass
class Context:
    """A browser context with one tab; `left` is how many more episodes it may serve."""

    connection: Connection
    id: str
    tab: str
    left: int

    @classmethod
    async def make(cls, connection: Connection, left: int) -> "Context":
        made = (await connection.call("Target.createBrowserContext", seconds=START_SECONDS))["browserContextId"]
        return cls(connection, made, await _open_tab(connection, made), left)

    async def attach(self) -> str:
        """Return a session of its tab."""
        # The tab's process may still be starting.
        place = {"targetId": self.tab, "flatten": True}
        return str((await self.connection.call("Target.attachToTarget", seconds=START_SECONDS, **place))["sessionId"])

    async def clear(self, host: str) -> None:
        """Replace the tab, and delete the cookies, storage and cache of the site at `host`."""
        # The new tab first, so that the context is never without one.
        used, self.tab = self.tab, await _open_tab(self.connection, self.id)
        call, session = self.connection.call, await self.attach()
        await call("Target.closeTarget", targetId=used)
        await call("Storage.clearDataForOrigin", session, origin=f"http://{host}", storageTypes="all")
        await call("Network.clearBrowserCookies", session)
        await call("Network.clearBrowserCache", session)
        await call("Target.detachFromTarget", sessionId=session)

    async def dispose(self) -> None:
        with contextlib.suppress(BrowserGoneError, CommandError, TimeoutError):
            call = self.connection.call("Target.disposeBrowserContext", browserContextId=self.id)
            await asyncio.shield(call)


async def _open_tab(connection: Connection, context: str) -> str:
    # A tab starts a process, which takes its time on a busy machine.
    place = {"url": "about:blank", "browserContextId": context}
    return str((await connection.call("Target.createTarget", seconds=START_SECONDS, **place))["targetId"])


class Chromium:
    """Starts at the first page and again after it ended. At most `pages` are open at once; others wait.

    A browser context serves `reuse` episodes of a kind of site, one after the other.
    """

    def __init__(self, program: str | None, sandbox: str, limits: Limits, pages: int, reuse: int = 1) -> None:
        self._program, self._kind, self._limits = program, sandbox, limits
        self._places = asyncio.Semaphore(pages)
        self._starting = asyncio.Lock()
        self._pool: SandboxPool | None = None
        self._connection: Connection | None = None
        self._running = contextlib.AsyncExitStack()
        self._reuse = reuse
        self._idle: dict[str, list[Context]] = {}
        """Contexts that wait for another episode, by their site's host."""

    async def start(self) -> Connection:
        """Connect to the browser that runs, or start one. Raises HeadwayError where that fails."""
        async with self._starting:
            if self._connection is None or self._connection.closed:
                await self._running.aclose()
                self._connection = await self._launch()
            return self._connection

    async def close(self) -> None:
        await self._running.aclose()
        self._connection = None
        self._idle.clear()
        if self._pool is not None:
            await self._pool.close()
            self._pool = None

    @asynccontextmanager
    async def page(self, site: Site) -> AsyncIterator[Page]:
        """Open a site in a tab of its own. Cookies, storage and cache are never shared with another episode."""
        async with self._places:
            context = await self._context(site.host)
            try:
                opened = Page(context.connection, await context.attach(), site)
                try:
                    await opened.open()
                    yield opened
                finally:
                    opened.close()
                context.left -= 1
                if kept := opened.alive and context.left > 0:
                    await context.clear(site.host)
            except BaseException:
                await context.dispose()
                raise
            if kept:
                self._idle.setdefault(site.host, []).append(context)
            else:
                await context.dispose()

    async def _context(self, host: str) -> Context:
        """Take a context that waits, or make one."""
        connection = await self.start()
        idle = self._idle.pop(host, [])
        usable = [context for context in idle if context.connection is connection]
        context = usable.pop() if usable else await Context.make(connection, self._reuse)
        self._idle.setdefault(host, []).extend(usable)
        return context

    async def _launch(self) -> Connection:
        program = find_chromium(self._program)
        if self._pool is None:
            self._pool = SandboxPool(self._kind, most=1)
        recipe = Recipe(files={"fonts.conf": _FONTS}, readable=_folder_of(program))
        box = await self._running.enter_async_context(self._pool.sandbox(recipe, self._limits, owner="browser"))
        words = [program, *_FLAGS, f"--user-data-dir={box.resolve('profile')}", "about:blank"]
        # The protocol's two pipes are the descriptors 3 and 4; stdin and stdout are those that cross the wall.
        script = f"exec {shlex.join(words)} 3<&0 4>&1 </dev/null >&2"
        process = await box.open_process(["sh", "-c", script], env={"FONTCONFIG_FILE": box.resolve("fonts.conf")})
        connection = Connection(process)
        self._running.push_async_callback(connection.close)
        try:
            await connection.greet()
            await connection.call("Browser.setDownloadBehavior", behavior="deny")
        except (HeadwayError, TimeoutError) as error:
            await self._running.aclose()
            raise HeadwayError(f"browser: {program} did not start: {error}") from error
        return connection


def _folder_of(program: str) -> tuple[Path, ...]:
    """Folders that a sandbox must show besides the system's, which has /usr."""
    folder = Path(program).resolve().parent
    return () if folder.is_relative_to("/usr") else (folder,)
