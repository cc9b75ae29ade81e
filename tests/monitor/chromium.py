"""A real headless Chromium, driven over its DevTools protocol: open a page, press keys, ask, take pictures."""

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--mute-audio",
    "--remote-debugging-port=0",
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PAINTED = """[...document.querySelectorAll('.chart canvas')].filter(canvas => canvas.width && canvas.getContext('2d')
    .getImageData(0, 0, canvas.width, canvas.height).data.some((value, place) => place % 4 === 3 && value)).length"""
"""Charts with something on them."""
ALL_PAINTED = f"{PAINTED} === document.querySelectorAll('.chart:not([hidden])').length"
PATIENCE = 120.0
"""Seconds that a browser on a busy machine gets to do a thing."""
KEYS = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "Tab": 9}


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. Console errors, exceptions and the URLs of all requests are collected as they come."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())
        self._traced = asyncio.Event()
        self.trace: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def send(self, method: str, **params: Any) -> Any:
        number = len(self._waiting) + 1
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(self._waiting[number], PATIENCE)

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                waiting = self._waiting[event["id"]]
                if "error" in event:
                    waiting.set_exception(RuntimeError(event["error"]["message"]))
                else:
                    waiting.set_result(event["result"])
            else:
                self._saw(event["method"], event["params"])

    def _saw(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            detail = params["exceptionDetails"]
            self.errors.append(detail.get("exception", {}).get("description") or detail["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(str([value.get("value") for value in params["args"]]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Tracing.dataCollected":
            self.trace += params["value"]
        elif method == "Tracing.tracingComplete":
            self._traced.set()

    async def start(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")

    async def goto(self, url: str) -> None:
        """Open an address of the application and wait until its view is drawn."""
        await self.send("Page.navigate", url=url)
        hash_ = "#" + url.partition("#")[2] if "#" in url else "#/"
        await self.until(f"document.body?.dataset.ready === {json.dumps(hash_)}")

    async def traced(self, work: Awaitable[Any], categories: str) -> Any:
        """What `work` returns; the browser's events of these categories meanwhile are in `trace`."""
        self.trace.clear()
        self._traced.clear()
        await self.send("Tracing.start", transferMode="ReportEvents", traceConfig={"includedCategories": [categories]})
        try:
            return await work
        finally:
            await self.send("Tracing.end")
            await asyncio.wait_for(self._traced.wait(), PATIENCE)

    async def live(self) -> None:
        """Wait until the page is told about changes of runs: those from now on reach it."""
        await self.until("document.querySelector('.live.on') !== null")

    async def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", expression))
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = PATIENCE) -> Any:
        """Wait until an expression is true, and return it."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            with contextlib.suppress(RuntimeError):
                if value := await self.ask(expression):
                    return value
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"never true: {expression}; errors: {self.errors}; {await self.text()}")
            await asyncio.sleep(0.05)

    async def until_requested(self, part: str) -> None:
        """Wait until an address that contains `part` was asked for."""
        for _ in range(int(PATIENCE / 0.05)):
            if any(part in url for url in self.requests):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never asked for {part}; the last were {[url[-60:] for url in self.requests[-5:]]}")

    async def text(self) -> str:
        return str(await self.ask("document.body?.innerText.slice(0, 500)"))

    async def press(self, key: str) -> None:
        code = KEYS.get(key, ord(key.upper()) if len(key) == 1 else 0)
        text = key if len(key) == 1 else "\r" if key == "Enter" else ""
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=code)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def fill(self, selector: str, value: str) -> None:
        await self.ask(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)});"
            f" field.value = {json.dumps(value)};"
            " field.dispatchEvent(new Event('input')); field.dispatchEvent(new Event('change')); })()"
        )

    async def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        places = [("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)]
        for kind, (x, y) in places:
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)  # out of the way of what comes next

    async def size(self, width: int, height: int, scale: float = 1.0, mobile: bool = False) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    async def picture(self, kind: str = "png") -> bytes:
        return base64.b64decode((await self.send("Page.captureScreenshot", format=kind))["data"])


@contextlib.asynccontextmanager
async def open_page() -> AsyncIterator[Page]:
    """A tab of a fresh browser, which is gone afterwards."""
    binary = find_chromium()
    assert binary is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = await asyncio.create_subprocess_exec(
            binary, *FLAGS, f"--user-data-dir={profile}", "about:blank", stdout=DEVNULL, stderr=DEVNULL
        )
        try:
            async with aiohttp.ClientSession() as session:
                port = await _port(Path(profile) / "DevToolsActivePort", browser)
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json(content_type=None)
                url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    page = Page(socket)
                    await page.start()
                    await page.size(1280, 900)
                    yield page
        finally:
            browser.terminate()
            await browser.wait()


async def _port(file: Path, browser: Process) -> int:
    for _ in range(1200):
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        if browser.returncode is not None:
            raise RuntimeError(f"chromium ended with {browser.returncode}")
        await asyncio.sleep(0.05)
    raise RuntimeError("chromium did not open its debugging port")
