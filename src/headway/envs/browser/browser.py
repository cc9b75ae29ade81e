"""Tasks on web sites: read the page, click, type, select, scroll, go back, submit; the site's own state is checked."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from random import Random
from typing import Any, Literal, get_args

import msgspec

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.core.images import MessageImage
from headway.core.messages import Message
from headway.envs.base import EpisodeFailure, Policy, State, ToolUse, metric, reward, tool
from headway.envs.browser.cdp import BrowserGoneError, CommandError
from headway.envs.browser.chromium import Chromium, find_chromium
from headway.envs.browser.page import ActionError, Page
from headway.envs.browser.players import DONE, play_site
from headway.envs.browser.sites import SITES
from headway.envs.browser.sites.vote import Vote
from headway.envs.browser.tree import Style
from headway.envs.bundled.problems import Row, Split, demonstration, distinct, opening
from headway.envs.policy import ScriptedPolicy
from headway.envs.sandboxed import read_limits

SYSTEM = (
    "You use a web site. Elements that you can use have a number in brackets; give that number to the tools. Every "
    "tool shows the page as it is afterwards. Reply in words, without a tool, when the task is done."
)
Screenshots = Literal["none", "beside", "instead"]
KINDS = ("form", "shop", "wiki", "table")
"""Sites of tasks unless others are named."""
LIMITS = {"memory": 2 << 30, "processes": 2048, "cpus": 2.0, "disk": 512 << 20}


class Browser(ToolUse):
    """Tasks of the kinds `sites`, in equal numbers: "form", "shop", "wiki", "table"; and "vote", the smallest.

    `observation` is "tree" (roles, indented) or "text" (plain lines). `screenshots` are for models that see: "beside"
    shows the window as an image, too, "instead" in place of that text. `pages` bounds the pages that are open at once
    in a worker; `limits` are those of the sandbox in which its one Chromium runs. A browser context serves `reuse`
    episodes, one after the other. `describe_tools = false` keeps the list of tools out of the prompt.
    """

    max_turns = 30
    max_output = 6000

    def __init__(
        self,
        *,
        sites: Sequence[str] = KINDS,
        num_tasks: int = 256,
        split: Split = "train",
        seed: int = 0,
        observation: Style = "tree",
        screenshots: Screenshots = "none",
        turns: int = 30,
        chromium: str | None = None,
        sandbox: str = "auto",
        limits: Mapping[str, Any] | None = None,
        pages: int = 8,
        reuse: int = 1,
        system: str | None = SYSTEM,
        describe_tools: bool = True,
    ) -> None:
        if not sites or not set(sites) <= set(SITES):
            raise UsageError(f"browser: sites must be some of {', '.join(SITES)} (got {', '.join(sites) or 'none'})")
        if observation not in ("tree", "text"):
            raise UsageError(f'browser: observation must be "tree" or "text" (got "{observation}")')
        if screenshots not in get_args(Screenshots):
            raise UsageError(f'browser: screenshots must be "none", "beside" or "instead" (got "{screenshots}")')
        if reuse < 1:
            raise UsageError(f"browser: reuse must be at least 1 (got {reuse})")
        self.max_turns, self.describe_tools, self._system = turns, describe_tools, system
        self._style: Style = observation
        self._screenshots: Screenshots = screenshots
        self._tasks = _make_tasks(sites, num_tasks, split, seed)
        self._program = chromium
        bounds = read_limits("browser", {**LIMITS, **(limits or {})})
        self._chromium = Chromium(chromium, sandbox, bounds, pages, reuse)

    def tasks(self) -> Sequence[Task]:
        return self._tasks

    @property
    def plain(self) -> bool:
        """Tell whether pages are shown as plain text alone."""
        return self._style == "text" and self._screenshots == "none"

    async def open(self) -> None:
        find_chromium(self._program)
        await self._chromium.start()

    async def close(self) -> None:
        await self._chromium.close()

    def prompt(self, task: Task) -> list[Message]:
        visit = _visit.get(None)
        said = opening(self._system, str(task.data["goal"]) + (f"\n\n{visit.first_look}" if visit else ""))
        if visit is not None and visit.first_shot is not None:
            said[-1] = msgspec.structs.replace(
                said[-1], images=(MessageImage.of(visit.first_shot, at=len(said[-1].content)),)
            )
        return said

    async def run(self, task: Task, policy: Policy) -> State:
        site = SITES[task.data["site"]](task.data["seed"])
        try:
            async with self._chromium.page(site) as page:
                token = _visit.set(Visit(page, await self._look(page), await self._shot(page)))
                try:
                    state = await super().run(task, policy)
                finally:
                    _visit.reset(token)
        except (BrowserGoneError, CommandError) as error:
            raise EpisodeFailure("environment", f"browser: {error}") from error
        except TimeoutError as error:
            told = "the page did not open or close in time; open fewer at once (`pages`), or run less beside it"
            raise EpisodeFailure("environment", f"browser: {told}") from error
        state.progress = site.progress()
        return state

    async def respond(self, state: State, reply: Message) -> Any:
        visit = _visit.get()
        visit.document = visit.page.document
        told = await super().respond(state, reply)
        if not visit.page.alive:
            raise EpisodeFailure("environment", "browser: the page or its browser crashed")
        if told and (shot := await self._shot(visit.page)) is not None:
            # Chat templates have images in a user's messages, and not all have them in a tool's.
            told = [*told, Message("user", images=(MessageImage.of(shot),))]
        return told

    async def _look(self, page: Page) -> str:
        return await page.look(None if self._screenshots == "instead" else self._style)

    async def _shot(self, page: Page) -> bytes | None:
        """The window as an image, where the model is to see it."""
        return None if self._screenshots == "none" else await page.screenshot()

    @tool
    async def click(self, element: int) -> str:
        """Click an element.

        Args:
            element: its number
        """
        return await self._act(lambda page: page.click(element))

    @tool
    async def type(self, element: int, text: str) -> str:
        """Write a text into a field, in place of what it holds.

        Args:
            element: the field's number
            text: the text
        """
        return await self._act(lambda page: page.type(element, text))

    @tool
    async def select(self, element: int, option: str) -> str:
        """Choose from a list (a combobox).

        Args:
            element: the list's number
            option: the option, as it is written there
        """
        return await self._act(lambda page: page.select(element, option))

    @tool
    async def scroll(self, direction: Literal["up", "down"]) -> str:
        """Scroll the page by most of the window's height."""
        return await self._act(lambda page: page.scroll(direction), numbered=False)

    @tool
    async def back(self) -> str:
        """Go back to the page before this one."""
        return await self._act(lambda page: page.back(), numbered=False)

    @tool
    async def submit(self, element: int) -> str:
        """Submit the form that an element is in.

        Args:
            element: the number of a field of the form
        """
        return await self._act(lambda page: page.submit(element))

    async def _act(self, action: Callable[[Page], Awaitable[None]], numbered: bool = True) -> str:
        """Do an action and show the page afterwards. An action that can't be done is told and changes nothing."""
        visit = _visit.get()
        if numbered and visit.page.document != visit.document:
            return "error: an earlier call of this reply opened another page; use the numbers of that page"
        try:
            await action(visit.page)
            await visit.page.settle()
            return await self._look(visit.page)
        except (ActionError, CommandError) as error:
            return f"error: {error}"
        except TimeoutError:
            return "error: the page does not respond"

    @reward(within=(0, 1))
    def solved(self, state: State) -> float:
        """1 if the site's state is exactly what the task asks for."""
        return float(state.progress == 1.0)

    @metric
    def progress(self, state: State) -> float:
        return float(state.progress)


@dataclass
class Visit:
    """The page of an episode, and the document that the model saw when it wrote its last reply."""

    page: Page
    first_look: str
    first_shot: bytes | None = None
    document: int = 0


_visit: ContextVar[Visit] = ContextVar("headway_browser_visit")


def _make_tasks(sites: Sequence[str], count: int, split: Split, seed: int) -> list[Task]:
    """Make tasks of all kinds in turn. A task's id, its kind and seed, decides its split."""
    kinds = list(dict.fromkeys(sites))
    made: list[list[Task]] = []
    for number, name in enumerate(kinds):
        share = len(range(number, count, len(kinds)))
        ids = distinct(partial(_draw_id, name), str, share, split=split, seed=seed)
        made.append([_task(name, int(id.rpartition("-")[2])) for id in ids])
    return [task for together in zip_longest(*made) for task in together if task is not None]


def _draw_id(name: str, rng: Random) -> str:
    return f"{name}-{rng.randrange(10**6)}"


def _task(name: str, seed: int) -> Task:
    return Task(f"{name}-{seed}", {"site": name, "seed": seed, "goal": SITES[name](seed).goal})


def demonstrations(n: int, seed: int = 0, give_up_share: float = 0.0, **args: Any) -> list[Row]:
    """`n` conversations of scripted players in a real Chromium, all solved; none is a task of the eval split.

    A share of them does nothing and says that it is done. Those of the site "vote" with `observation = "text"` are
    written without a browser. `args` are those of the environment.
    """
    environment = Browser(num_tasks=n, seed=seed, split="train", **args)
    if args.get("screenshots") == "instead":
        raise UsageError('browser: scripted players read text: use screenshots = "beside" for demonstrations')
    rng = Random(seed)
    idle = {task.id for task in environment.tasks() if rng.random() < give_up_share}
    if environment.plain and all(task.data["site"] == Vote.name for task in environment.tasks()):
        tools = _tools(environment)
        return [_written(task, idle, environment.prompt(task), tools) for task in environment.tasks()]
    return asyncio.run(_demonstrate(environment, idle))


async def _demonstrate(environment: Browser, idle: set[str]) -> list[Row]:
    rows = []
    await environment.open()
    try:
        for task in environment.tasks():
            state = await environment.run(task, ScriptedPolicy(partial(_reply, task, idle)))
            rows.append({**demonstration(state.messages), "tools": _tools(environment)})
    finally:
        await environment.close()
    return rows


def _written(task: Task, idle: set[str], said: list[Message], tools: list[dict[str, Any]]) -> Row:
    """Write what would happen in a browser: the page after the goal, a click, the page after it."""
    before, after = Vote(task.data["seed"]).looks
    said[-1] = Message("user", f"{said[-1].content}\n\n{before}")
    while (reply := _reply(task, idle, "", said)).tool_calls:
        call = reply.tool_calls[0]
        said += [reply, Message("tool", after, tool_call_id=call.id, name=call.name)]
    return {**demonstration([*said, reply]), "tools": tools}


def _tools(environment: Browser) -> list[dict[str, Any]]:
    return [tool.to_openai() for tool in environment.toolbox.tools] if environment.describe_tools else []


def _reply(task: Task, idle: set[str], _agent: str, messages: list[Message]) -> Message:
    return DONE if task.id in idle else play_site(task.data["site"], messages)
