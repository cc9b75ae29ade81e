"""A page in its own browser context: requests answered by the site, actions on elements, and what is to be seen."""

import asyncio
import base64
import logging
from typing import Any, Literal
from urllib.parse import urlsplit

from headway.envs.browser.cdp import CommandError, Connection
from headway.envs.browser.screenshot import Mark, draw_marks
from headway.envs.browser.site import Request, Response, Site
from headway.envs.browser.tree import NUMBERED, Line, Style, read_tree, write_lines

logger = logging.getLogger(__name__)

WIDTH, HEIGHT = 1024, 768
SETTLE_SECONDS = 5.0
"""How long a page may load after an action before it is shown as it is."""
_QUIET = "new Promise(done => setTimeout(done, 15))"

_OPTIONS = "function() { return this.options ? [...this.options].map(o => o.text) : null }"
_CHOOSE = """function(text) {
  this.value = [...this.options].find(o => o.text === text).value;
  for (const kind of ["input", "change"]) this.dispatchEvent(new Event(kind, {bubbles: true}));
}"""
_EDIT = """function() {
  const typed = this.matches("textarea, input:not([type=checkbox],[type=radio],[type=button],[type=submit])");
  if (!typed || this.disabled || this.readOnly) return false;
  this.focus();
  this.select();
  return true;
}"""
_SUBMIT = """function() {
  const form = this.form || this.closest("form");
  if (form) form.requestSubmit();
  return !!form;
}"""
_LINK = "function() { const link = this.closest('a[href]'); return link && link.href }"


class ActionError(Exception):
    """An action that can't be done; the message tells the model why."""


class Page:
    """A tab. `open` it first. Elements have numbers, which they keep until another document is shown."""

    def __init__(self, connection: Connection, session: str, site: Site) -> None:
        self._connection, self._session, self._site = connection, session, site
        self._loading = False
        self._requests: set[str] = set()
        self._answers: set[asyncio.Task[None]] = set()
        self._numbers: dict[int, int] = {}
        self._blocked: list[str] = []
        self._marks: list[Mark] = []
        """Numbered elements in the window, at the last look."""
        self.document = 0
        """Counts the documents that were shown."""
        self.crashed = False
        connection.listen(session, self._event)

    async def open(self) -> None:
        for domain in ("Page", "Network", "Inspector"):
            await self._call(f"{domain}.enable")
        await self._call("Fetch.enable", patterns=[{"urlPattern": "*"}])
        await self._call("Emulation.setFocusEmulationEnabled", enabled=True)
        metrics = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        await self._call("Emulation.setDeviceMetricsOverride", **metrics)
        await self._call("Page.navigate", url=f"http://{self._site.host}/")
        await self.settle()
        await self._call("Page.resetNavigationHistory")

    def close(self) -> None:
        self._connection.forget(self._session)
        for task in self._answers:
            task.cancel()

    @property
    def alive(self) -> bool:
        return not (self.crashed or self._connection.closed)

    async def look(self, style: Style | None) -> str:
        """Describe the part of the page that is in the window, and say what was blocked since the last look. Without a
        style, elements are left to a screenshot."""
        lines = read_tree((await self._call("Accessibility.getFullAXTree"))["nodes"])
        for line in lines:
            if line.role in NUMBERED and line.node not in self._numbers:
                self._numbers[line.node] = len(self._numbers) + 1
        snapshot = await self._call("DOMSnapshot.captureSnapshot", computedStyles=[])
        seen, above, below = _in_window(lines, snapshot["documents"][0])
        self._marks = _marks(seen, self._numbers, snapshot["documents"][0])
        told = [f"blocked: {url} (only this site can be reached)" for url in self._blocked]
        self._blocked.clear()
        head = await self._address()
        more = [f"[{side}: {count} more lines; use scroll]" for side, count in (("above", above), ("below", below))]
        body = [] if style is None else write_lines(seen, self._numbers, style)
        return "\n".join([*told, head, *more[: above > 0], *body, *(more[1:] if below else [])])

    async def screenshot(self) -> bytes:
        """Photograph the window as a PNG, with the numbers of elements as they were at the last look."""
        shot = await self._call("Page.captureScreenshot", format="png")
        return await asyncio.to_thread(draw_marks, base64.b64decode(shot["data"]), self._marks)

    async def click(self, number: int) -> None:
        node = self._node(number)
        target = await self._apply(node, _LINK)
        if target:
            parts = urlsplit(str(target))
            if parts.scheme != "http" or parts.netloc != self._site.host:
                raise ActionError(f"this link leads to {str(target)[:200]}; only this site can be reached")
        try:
            await self._call("DOM.scrollIntoViewIfNeeded", backendNodeId=node)
            quads = (await self._call("DOM.getContentQuads", backendNodeId=node))["quads"]
        except CommandError:
            quads = []
        if not quads:
            raise ActionError(f"element {number} can't be clicked: it is not shown")
        x, y = sum(quads[0][0::2]) / 4, sum(quads[0][1::2]) / 4
        await self._mouse("mouseMoved", x, y, 0)
        await self._mouse("mousePressed", x, y, 1)
        await self._mouse("mouseReleased", x, y, 1)

    async def type(self, number: int, text: str) -> None:
        """Replace what a field holds."""
        if not await self._apply(self._node(number), _EDIT):
            raise ActionError(f"element {number} takes no text")
        if text:
            await self._call("Input.insertText", text=text)
        else:
            for kind in ("keyDown", "keyUp"):
                await self._call("Input.dispatchKeyEvent", type=kind, key="Delete", windowsVirtualKeyCode=46)

    async def select(self, number: int, option: str) -> None:
        node = self._node(number)
        options = await self._apply(node, _OPTIONS)
        if options is None:
            raise ActionError(f"element {number} is no list to select from")
        if option not in options:
            raise ActionError(f"there is no option {option!r}; the options are {', '.join(map(repr, options))}")
        await self._apply(node, _CHOOSE, option)

    async def scroll(self, direction: Literal["up", "down"]) -> None:
        way = 0.8 * HEIGHT * (1 if direction == "down" else -1)
        await self._call("Runtime.evaluate", expression=f"window.scrollBy({{top: {way}, behavior: 'instant'}})")

    async def back(self) -> None:
        history = await self._call("Page.getNavigationHistory")
        if history["currentIndex"] == 0:
            raise ActionError("there is no page before this one")
        entry = history["entries"][history["currentIndex"] - 1]["id"]
        await self._call("Page.navigateToHistoryEntry", entryId=entry)

    async def submit(self, number: int) -> None:
        if not await self._apply(self._node(number), _SUBMIT):
            raise ActionError(f"element {number} is in no form")

    async def settle(self) -> None:
        """Wait until nothing loads and scripts have had their turn."""
        deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
        quiet = 0
        while quiet < 2 and self.alive and asyncio.get_running_loop().time() < deadline:
            try:
                await self._call("Runtime.evaluate", expression=_QUIET, awaitPromise=True)
            except CommandError:  # the document went away meanwhile
                quiet = 0
            quiet = 0 if self._loading or self._requests or self._answers else quiet + 1

    async def _address(self) -> str:
        history = await self._call("Page.getNavigationHistory")
        entry = history["entries"][history["currentIndex"]]
        parts = urlsplit(entry["url"])
        return f'page "{entry["title"]}" at {parts.path}{"?" + parts.query if parts.query else ""}'

    def _node(self, number: int) -> int:
        for node, known in self._numbers.items():
            if known == number:
                return node
        raise ActionError(f"there is no element {number} on this page")

    async def _apply(self, node: int, function: str, *arguments: object) -> Any:
        """Call a function of JavaScript on a node."""
        try:
            found = await self._call("DOM.resolveNode", backendNodeId=node)
        except CommandError:
            raise ActionError("this element is no longer on the page") from None
        answer = await self._call(
            "Runtime.callFunctionOn",
            objectId=found["object"]["objectId"],
            functionDeclaration=function,
            arguments=[{"value": argument} for argument in arguments],
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            raise ActionError("the page does not allow this")
        return answer["result"].get("value")

    async def _mouse(self, kind: str, x: float, y: float, count: int) -> None:
        button = "left" if count else "none"
        await self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=count)

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._connection.call(method, self._session, **params)

    def _event(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Fetch.requestPaused":
                self._spawn(self._answer(params))
            case "Network.requestWillBeSent":
                self._requests.add(params["requestId"])
            # A response is enough: the end is never told of one whose body the page's script does not read.
            case "Network.responseReceived" | "Network.loadingFinished" | "Network.loadingFailed":
                self._requests.discard(params["requestId"])
            case "Page.frameStartedLoading":
                self._loading = True
            case "Page.frameStoppedLoading":
                self._loading = False
            case "Page.frameNavigated" if "parentId" not in params["frame"]:
                self.document += 1
                self._numbers.clear()
            case "Page.javascriptDialogOpening":
                self._spawn(self._quietly("Page.handleJavaScriptDialog", accept=False))
            case "Inspector.targetCrashed":
                self.crashed = True

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, paused: dict[str, Any]) -> None:
        """Answer a request by the site; requests to other hosts fail, and leave the page as it is."""
        asked = paused["request"]
        parts = urlsplit(asked["url"])
        if parts.scheme != "http" or parts.netloc != self._site.host:
            self._blocked.append(asked["url"][:200])
            await self._quietly("Fetch.failRequest", requestId=paused["requestId"], errorReason="Aborted")
            return
        try:
            response = self._site.handle(Request.read(asked["method"], asked["url"], asked.get("postData", "")))
        except Exception:
            logger.exception("browser: the site %s failed at %s", self._site.name, parts.path)
            response = Response("the site failed", status=500)
        headers = {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store"}
        if response.location is not None:
            headers["Location"] = response.location
        await self._quietly(
            "Fetch.fulfillRequest",
            requestId=paused["requestId"],
            responseCode=response.status,
            responseHeaders=[{"name": name, "value": value} for name, value in headers.items()],
            body=base64.b64encode(response.body.encode()).decode(),
        )

    async def _quietly(self, method: str, **params: Any) -> None:
        """Send a command whose failure changes nothing: the page that it was for may be gone."""
        try:
            await self._call(method, **params)
        except (CommandError, TimeoutError) as error:
            logger.debug("browser: %s: %s", method, error)


def _boxes(document: dict[str, Any]) -> dict[int, list[float]]:
    """Find nodes in the document: x, y, width and height."""
    nodes, layout = document["nodes"]["backendNodeId"], document["layout"]
    return {nodes[index]: box for index, box in zip(layout["nodeIndex"], layout["bounds"], strict=True)}


def _marks(lines: list[Line], numbers: dict[int, int], document: dict[str, Any]) -> list[Mark]:
    """The numbers of lines, where their nodes are in the window."""
    boxes, left, top = _boxes(document), document.get("scrollOffsetX", 0), document.get("scrollOffsetY", 0)
    shown = [(numbers[line.node], boxes[line.node]) for line in lines if line.node in numbers and line.node in boxes]
    return [Mark(number, x - left, y - top) for number, (x, y, _, _) in shown]


def _in_window(lines: list[Line], document: dict[str, Any]) -> tuple[list[Line], int, int]:
    """Pick the lines whose nodes lie in the window; also count those above and below it."""
    boxes = _boxes(document)
    top = document.get("scrollOffsetY", 0)
    seen, above, below = [], 0, 0
    for line in lines:
        _, y, _, height = boxes.get(line.node, (0, top, 0, 0))
        if y + height < top:
            above += 1
        elif y > top + HEIGHT:
            below += 1
        else:
            seen.append(line)
    return seen, above, below
