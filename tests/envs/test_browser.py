"""The browser environment in a real Chromium: scripted players, hostile actions, nothing reached, nothing left."""

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from PIL import Image

from headway.base.errors import HeadwayError, UsageError
from headway.core.episodes import Task
from headway.core.images import MessageImage
from headway.core.messages import Message, ToolCall
from headway.envs.browser import cdp
from headway.envs.browser.browser import KINDS, Browser, demonstrations
from headway.envs.browser.page import HEIGHT, WIDTH
from headway.envs.browser.players import play_site
from headway.envs.browser.screenshot import PAPER
from headway.envs.browser.site import Request, Response, Site, page
from headway.envs.browser.sites import SITES
from headway.envs.policy import EpisodeFailure, ScriptedPolicy
from headway.envs.rewards import score
from real_browser import missing

real = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def call(name: str, **arguments: object) -> Message:
    return Message("assistant", tool_calls=(ToolCall("call", name, json.dumps(arguments)),))


async def play(environment: Browser, task, act: Callable[[list[Message]], Message]):
    policy = ScriptedPolicy(lambda _, messages: act(messages))
    state = await environment.run(task, policy)
    await score(environment.rewards(), task, [policy.trace], state)
    return policy.trace, state


class Trap(Site):
    """Links and scripts that lead elsewhere, hang, or ask."""

    name = "trap"

    def handle(self, request: Request) -> Response:
        if request.path == "/error":
            raise ValueError("a bug of the site")
        return page(
            f"Trap {request.path}",
            "<a href='javascript:document.title=`taken`'>script</a> <a href='http://other.test/'>other</a> "
            "<a href='https://trap.test/'>secure</a> <a href='/new' target=_blank>window</a> ",
            "<a href='/error'>broken</a> ",
            "<button onclick='location = `http://127.0.0.1:1/`'>leave</button> ",
            "<button onclick='document.title = confirm(`sure?`)'>ask</button> ",
            "<button onclick='while (true);'>hang</button> ",
            "<button hidden>unseen</button><img src='http://other.test/spy.png' alt=''>",
        )

    def progress(self) -> float:
        return 0.0


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def browser(loop: asyncio.Runner) -> Iterator[Browser]:
    """One environment, and one Chromium, for all tests that need a real one."""
    environment = Browser(num_tasks=4, seed=1)
    loop.run(environment.open())
    yield environment
    loop.run(environment.close())


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SITES, "trap", Trap)


def at(shown: str, name: str) -> int:
    line = next(line for line in shown.splitlines() if f'"{name}"' in line)
    return int(line.partition("[")[2].partition("]")[0])


@real
@pytest.mark.parametrize("number", range(4))
def test_a_scripted_player_solves_every_kind_of_task(loop, browser, number):
    task = browser.tasks()[number]
    trace, state = loop.run(play(browser, task, lambda messages: play_site(task.data["site"], messages)))
    assert trace.rewards == {"solved": 1.0}, [message.content for message in state.messages]


class Keeper(Site):
    """Keeps what a page can keep, and shows what was kept before."""

    name = "keeper"

    def handle(self, request: Request) -> Response:
        return page(
            "Keeper",
            "<p id=found></p><script>"
            "found.textContent = ['found', document.cookie, localStorage.a, sessionStorage.a, window.name].join(' ');"
            "document.cookie = 'a=cookie; max-age=999'; localStorage.a = 'local'; sessionStorage.a = 'session';"
            "window.name = 'window'</script><a href='/again'>again</a>",
        )

    def progress(self) -> float:
        return 0.0


@real
def test_a_context_that_serves_again_holds_nothing_of_the_episode_before(loop, browser, monkeypatch):
    monkeypatch.setitem(SITES, "keeper", Keeper)
    monkeypatch.setattr(browser, "_style", "text")
    monkeypatch.setattr(browser._chromium, "_reuse", 2)
    task = Task("keeper", {"site": "keeper", "seed": 0, "goal": "look"})
    made = []
    for _ in range(3):
        script = iter([call("click", element=1), call("back"), Message("assistant", "done")])
        _, state = loop.run(play(browser, task, lambda _, script=script: next(script)))
        assert state.messages[1].content.splitlines()[4] == "found", state.messages[1].content
        assert "found a=cookie local session window" in state.messages[3].content
        made.append([context.id for context in browser._chromium._idle["keeper.test"]])
    # One context for the first two episodes, another for the third.
    assert [len(ids) for ids in made] == [1, 0, 1] and made[0] != made[2]


@real
def test_demonstrations_of_a_vote_are_written_as_a_browser_shows_it(loop, browser, monkeypatch):
    args = {"sites": ["vote"], "observation": "text", "seed": 3, "system": None}
    (task,) = Browser(num_tasks=1, **args).tasks()
    (written,) = demonstrations(1, **{**args, "describe_tools": False})
    monkeypatch.setattr(browser, "_style", "text")
    monkeypatch.setattr(browser, "_system", None)
    trace, state = loop.run(play(browser, task, lambda messages: play_site("vote", messages)))
    assert trace.rewards == {"solved": 1.0}
    assert written == {"messages": [message.to_openai() for message in state.messages], "tools": []}


def test_a_page_that_does_not_open_in_time_is_told_as_such(monkeypatch):
    @asynccontextmanager
    async def never(_site):
        raise TimeoutError
        yield

    environment = Browser(num_tasks=1)
    monkeypatch.setattr(environment._chromium, "page", never)
    with pytest.raises(EpisodeFailure, match="did not open or close in time"):
        asyncio.run(play(environment, environment.tasks()[0], lambda _: Message("assistant", "done")))


def test_some_demonstrations_do_nothing():
    rows = demonstrations(40, give_up_share=0.5, sites=["vote"], observation="text")
    assert 10 < sum(row["messages"][2]["content"] == "done" for row in rows) < 30
    assert all(len(row["tools"]) == 6 for row in rows)


@real
def test_text_is_enough_to_solve_a_task(loop, browser, monkeypatch):
    monkeypatch.setattr(browser, "_style", "text")
    (task,) = (task for task in browser.tasks() if task.data["site"] == "wiki")
    trace, state = loop.run(play(browser, task, lambda messages: play_site("wiki", messages)))
    assert trace.rewards == {"solved": 1.0}
    assert "\nAll rivers\n[1] link" in state.messages[1].content


def colors(image: MessageImage) -> tuple[tuple[int, int], int]:
    """The size of a screenshot, and how many of its pixels are of the paper of numbers."""
    with Image.open(io.BytesIO(image.data)) as opened:
        pixels = np.asarray(opened)
        return opened.size, int((pixels == PAPER).all(-1).sum())


@real
def test_a_model_that_sees_gets_the_window_beside_the_text_or_instead(loop, browser, monkeypatch):
    """Numbers of elements are drawn on it: more where there are more."""
    (task,) = (task for task in browser.tasks() if task.data["site"] == "form")
    monkeypatch.setattr(browser, "_screenshots", "beside")
    trace, state = loop.run(play(browser, task, lambda messages: play_site("form", messages)))
    assert trace.rewards == {"solved": 1.0}
    first, *later = [message for message in state.messages if message.images]
    assert "textbox" in first.content and first.images[0].at == len(first.content)
    assert [message.role for message in later] == ["user"] * sum(m.role == "tool" for m in state.messages)
    (size, drawn), (_, after) = colors(first.images[0]), colors(later[-1].images[0])
    assert size == (WIDTH, HEIGHT) and drawn > 1000 > after
    monkeypatch.setattr(browser, "_screenshots", "instead")
    script = iter([call("click", element=1), Message("assistant", "done")])
    _, state = loop.run(play(browser, task, lambda _: next(script)))
    prompt, told, shot = state.messages[1], state.messages[3], state.messages[4]
    assert prompt.content.splitlines()[-1].startswith('page "') and "textbox" not in prompt.content + told.content
    assert colors(prompt.images[0]) == (size, drawn) and shot.role == "user" and len(shot.images) == 1


def test_screenshots_are_one_of_three_and_no_players_read_them():
    with pytest.raises(UsageError, match='"none", "beside" or "instead"'):
        Browser(screenshots="yes")
    with pytest.raises(UsageError, match="scripted players read text"):
        demonstrations(1, screenshots="instead")


@real
def test_claims_are_not_rewarded_and_numbers_of_another_page_are_refused(loop, browser):
    (task,) = (task for task in browser.tasks() if task.data["site"] == "shop")
    trace, _ = loop.run(play(browser, task, lambda _: Message("assistant", "The order has been placed.")))
    assert trace.rewards == {"solved": 0.0}

    def twice(messages: list[Message]) -> Message:
        if messages[-1].role == "tool":
            return Message("assistant", "done")
        click = json.dumps({"element": at(messages[1].content, "Basket (0)")})
        return Message("assistant", tool_calls=(ToolCall("1", "click", click), ToolCall("2", "click", click)))

    _, state = loop.run(play(browser, task, twice))
    assert 'page "Basket" at /basket' in state.messages[3].content
    assert state.messages[4].content.startswith("error: an earlier call of this reply opened another page")


@real
def test_hostile_actions_are_told_and_nothing_else_is_reached(loop, browser, trap, monkeypatch):
    told: dict[str, str] = {}

    def script(messages: list[Message]):
        first = messages[-1].content
        for name in ("script", "other", "secure", "window", "leave", "ask"):
            told[name] = yield call("click", element=at(first, name))
        told["unknown"] = yield call("click", element=99)
        told["no text"] = yield call("type", element=at(first, "ask"), text="x")
        told["no list"] = yield call("select", element=at(first, "ask"), option="x")
        told["no form"] = yield call("submit", element=at(first, "ask"))
        told["back"] = yield call("back")
        told["not a number"] = yield call("click", element="[1]")
        told["broken"] = yield call("click", element=at(first, "broken"))
        told["return"] = yield call("back")
        monkeypatch.setattr(cdp, "CALL_SECONDS", 1.0)
        told["hang"] = yield call("click", element=at(told["return"], "hang"))
        yield Message("assistant", "done")

    running = None

    def act(messages: list[Message]) -> Message:
        nonlocal running
        if running is None:
            running = script(messages)
            return next(running)
        return running.send(messages[-1].content)

    trace, state = loop.run(play(browser, Task("trap", {"site": "trap", "seed": 0, "goal": "Stay here."}), act))
    assert trace.rewards == {"solved": 0.0}
    assert "blocked: http://other.test/spy.png" in state.messages[1].content
    for name in ("script", "other", "secure"):
        assert told[name].startswith("error: this link leads to"), told[name]
    assert told["window"].splitlines()[0] == 'page "Trap /" at /'
    assert told["leave"].startswith("blocked: http://127.0.0.1:1/") and 'page "Trap /" at /' in told["leave"]
    assert 'page "false" at /' in told["ask"]
    assert told["unknown"] == "error: there is no element 99 on this page"
    assert told["no text"].endswith("takes no text")
    assert told["no list"].endswith("is no list to select from")
    assert told["no form"].endswith("is in no form")
    assert told["back"] == "error: there is no page before this one"
    assert told["not a number"].startswith("error: ")
    assert "the site failed" in told["broken"]
    assert 'page "Trap /" at /' in told["return"]
    assert told["hang"] == "error: the page does not respond"


class Cookies(Site):
    """Shows the cookies that the browser has, and sets one."""

    name = "cookies"

    def handle(self, request: Request) -> Response:
        return page("x", "<script>document.title = document.cookie || 'none'; document.cookie = 'a=b'</script>")

    def progress(self) -> float:
        return 1.0


@real
def test_episodes_share_one_browser_and_nothing_else_and_the_next_one_survives_its_death(loop, browser):
    async def main() -> None:
        chromium = browser._chromium
        first = await chromium.start()
        for _ in range(2):
            async with chromium.page(Cookies(0)) as visited:
                assert (await visited.look("tree")).startswith('page "none"')
        assert await chromium.start() is first

        killing = []

        def kill(messages: list[Message]) -> Message:
            killing.append(asyncio.ensure_future(first._process.kill()))
            return call("click", element=1)

        with pytest.raises(EpisodeFailure, match=r"Chromium ended|crashed"):
            await play(browser, browser.tasks()[0], kill)
        async with chromium.page(Cookies(0)) as visited:
            assert visited.alive
        assert await chromium.start() is not first

    loop.run(main())


def test_sites_judge_their_own_state_only():
    shop = SITES["shop"](7)
    assert shop.progress() == 0.0
    for number, count in shop.wanted.items():
        shop.handle(Request("POST", "/basket/add", form={"article": str(number), "count": str(count)}))
    assert shop.progress() == 0.5
    shop.handle(Request("POST", "/order"))
    assert shop.progress() == 1.0
    form = SITES["form"](7)
    assert form.handle(Request("POST", "/register", form={"name": "x"})).status == 422 and not form.records
    form.handle(Request("POST", "/register", form={**form.wanted, "country": "nowhere"}))
    assert form.progress() == 0.8
    form.handle(Request("POST", "/register", form=form.wanted))
    assert form.progress() == 0.0  # registered twice
    table = SITES["table"](7)
    for number in table.invoices:
        table.handle(Request("POST", "/archive", form={"invoice": number}))
    assert table.progress() == 0.0
    wiki = SITES["wiki"](7)
    wiki.handle(Request("POST", f"/watch/{wiki.target.replace(' ', '_')}"))
    assert wiki.progress() == 1.0
    wiki.handle(Request("POST", f"/watch/{wiki.rivers[0].replace(' ', '_')}"))
    assert wiki.progress() == 0.0


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("seed", range(20))
def test_sites_never_fail_on_a_request(name, seed):
    site = SITES[name](seed)
    for method in ("GET", "POST", "PUT"):
        for path in ("/", "/article/x", "/article/-1", "/basket/add", "/basket/remove", "/order", "/archive", "/%00"):
            for fields in ({}, {"article": "999999999", "count": "²"}, {"page": "-3", "invoice": "x", "name": "<b>"}):
                assert site.handle(Request(method, path, fields, fields)).status in (200, 303, 404, 422)


def test_tasks_are_those_of_their_seed_and_splits_never_meet():
    train = Browser(num_tasks=40)
    assert [task.id for task in train.tasks()] == [task.id for task in Browser(num_tasks=40).tasks()]
    assert {task.data["site"] for task in train.tasks()[:4]} == set(KINDS)
    held_out = {task.id for task in Browser(num_tasks=40, split="eval").tasks()}
    assert len(held_out) == 40 and not held_out & {task.id for task in train.tasks()}
    assert {task.data["site"] for task in Browser(sites=["wiki"], num_tasks=3).tasks()} == {"wiki"}
    with pytest.raises(UsageError, match="sites must be some of form, shop"):
        Browser(sites=["bank"])


def test_a_missing_chromium_is_told_with_what_to_do():
    with pytest.raises(HeadwayError, match="apt-get install chromium"):
        asyncio.run(Browser(num_tasks=4, chromium="/no/such/chrome").open())
