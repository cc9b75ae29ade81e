"""The page in a real browser: it draws, it lives, it obeys the keyboard, and hostile rollouts do nothing."""

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import ALL_PAINTED, PAINTED, Page, find_chromium, open_page
from run_folders import BEGAN, HOSTILE, add_step, append, make_run, rollout, write_logprobs, write_rollouts

from headway.core.messages import ToolCall
from headway.monitor.dashboard import start_in_thread

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="needs a Chromium on this machine (apt install chromium)"
)

Body = Callable[[Page], Coroutine[Any, Any, None]]
MARKED = """(() => { // columns of a chart with a dashed line of this color, which marks are drawn with
    const canvas = document.querySelector('[aria-label=Entropy] canvas'), wanted = %s;
    const { data, width, height } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    const hit = place => Math.abs(data[place + 3] - 153) < 4
        && wanted.every((value, channel) => Math.abs(data[place + channel] - value) < 4);
    return [...Array(width).keys()].filter(x =>
        [...Array(height).keys()].filter(y => hit(4 * (y * width + x))).length > 40).length; })()"""
RED, BLUE = "[194, 53, 43]", "[37, 99, 235]"
MEGABYTE = "x" * 1_000_000


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("outputs")
    folder = make_run(root, "made", steps=30)
    append(folder / "metrics" / "orchestrator.jsonl", {"step": 20, "time": BEGAN, "eval/held-out/avg": 0.5})
    call = ToolCall("c1", "calculator", '{"expression": "1+1"}')
    write_rollouts(folder, 1, [rollout(1, 0.0, say=HOSTILE, calls=(call,)), rollout(1, 1.0, say=MEGABYTE)])
    write_rollouts(
        folder, 2, [rollout(2, 1.0, say="the quick brown fox"), rollout(2, 0.0, say="the slow brown fox", env="calc")]
    )
    write_logprobs(folder, 2, math.log(2))
    write_rollouts(folder, 3, [rollout(3, 0.5, error="timeout")])
    (folder / "logs" / "trainer_001.log").write_text(f"one {HOSTILE}\n" + "WARNING two\n")
    (folder / "logs" / "trainer_002.log").write_text(json.dumps({"time": BEGAN + 155}) + "\n")
    make_run(root, "other", steps=10)
    make_run(root, f"odd {HOSTILE.replace('/', '')}"[:120], steps=3)
    return root


@pytest.fixture(scope="module")
def url(outputs: Path) -> str:
    return start_in_thread(outputs)


@pytest.fixture(scope="module")
def visit(url: str) -> Iterator[Callable[[Body], None]]:
    """Runs a visit in one browser for all tests; each must leave no errors and stay on this machine."""
    with asyncio.Runner() as runner:
        browser = open_page()
        page = runner.run(browser.__aenter__())

        def run(body: Body) -> None:
            page.errors.clear()
            runner.run(body(page))
            assert page.errors == []
            assert [request for request in page.requests if not request.startswith((url, "data:", "blob:"))] == []

        yield run
        runner.run(browser.__aexit__(None, None, None))


def test_runs_are_listed_filtered_and_compared_by_keyboard(visit: Callable[[Body], None], url: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(url)
        await page.until("document.querySelectorAll('tbody tr').length === 3")
        await page.press("/")
        await page.until("document.activeElement.hasAttribute('data-search')")
        await page.fill("[data-search]", "made")
        await page.until("document.querySelectorAll('tbody tr').length === 1")
        await page.fill("[data-search]", "")
        await page.until("document.querySelectorAll('tbody tr').length === 3")
        await page.press("Escape")
        await page.until("!document.activeElement.hasAttribute('data-search')")
        for key in ("x", "j", "x", "c"):
            await page.press(key)
        await page.until("document.body.dataset.ready.startsWith('#/compare/')")
        await page.until(f"{PAINTED} > 5")
        await page.until("document.querySelector('.chart .keys').childElementCount === 2")
        await page.goto(url + "#/compare/made%2Cother")
        await page.until(f"{MARKED % BLUE} === 1")  # the restart of the first run, in its color

    visit(body)


def test_charts_draw_zoom_together_and_grow(visit: Callable[[Body], None], url: str, outputs: Path) -> None:
    async def body(page: Page) -> None:
        await page.goto(url + "#/run/made")
        await page.until(f"{PAINTED} > 15 && {ALL_PAINTED}")  # those out of sight too, ahead of time
        await page.until(f"{MARKED % RED} === 1")
        titles = await page.ask("[...document.querySelectorAll('.chart h3')].map(title => title.textContent)")
        wanted = {"Reward", "Evaluation", "Entropy", "Gradient norm", "Errors by cause", "Lag of rollouts"}
        assert wanted <= set(titles)
        place = await page.ask(
            "(() => { const box = document.querySelector('.u-over').getBoundingClientRect();"
            " return [box.left, box.top, box.width]; })()"
        )
        left, top, width = place
        await page.drag((left + 0.2 * width, top + 40), (left + 0.6 * width, top + 40))
        await page.until("!document.querySelectorAll('.bar button')[0].disabled")
        await page.until_requested("from=6&to=19")
        await page.ask("document.querySelectorAll('.bar button')[0].click()")
        before = "document.querySelector('.tiles').innerText.includes('30 / 30')"
        await page.until(before)
        await page.live()
        add_step(outputs / "made", 31)
        await page.until("document.querySelector('.tiles').innerText.includes('31 / 30')")
        await page.until("document.querySelector('.chart .keys').textContent.includes('0.31')")
        await page.fill("input[type=range]", "0.9")
        await page.until(ALL_PAINTED)

    visit(body)


def test_heat_maps_that_come_late_are_drawn_out_of_sight(visit: Callable[[Body], None], url: str) -> None:
    """While rollouts are being read, the answers have nothing to draw."""
    unread = """(() => { window.plain = window.fetch; window.late = 0;
        window.fetch = async (address, ...rest) => {
            const answer = await window.plain(address, ...rest);
            if (!String(address).includes('/heat?')) return answer;
            window.late += 1;
            const data = { ...await answer.json(), counts: [], progress: { indexed: 0, steps: 3 } };
            return new Response(JSON.stringify(data), { headers: { 'Content-Type': 'application/json' } });
        }; })()"""
    map_ = "document.querySelector('[aria-label=\"Reward of rollouts\"]')"
    pixels = "canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data"
    drawn = f"(canvas => {pixels}.some((value, place) => place % 4 === 3 && value))({map_}.querySelector('canvas'))"

    async def body(page: Page) -> None:
        await page.size(1280, 200)
        await page.goto(url)
        await page.ask(unread)
        await page.goto(url + "#/run/made")
        await page.until(f"window.late >= 4 && {map_}.textContent.includes('read 0 of 3')")
        assert not await page.ask(drawn)
        await page.ask("(() => { window.fetch = window.plain; })()")
        await page.until(drawn)
        away = await page.ask(f"{map_}.getBoundingClientRect().top - innerHeight")
        assert away > 700 and await page.ask("scrollY") == 0
        await page.size(1280, 900)

    visit(body)


def test_lanes_show_who_waited(visit: Callable[[Body], None], url: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(url + "#/run/made/lanes")
        await page.until("document.querySelector('table').textContent.includes('wait for rollouts')")
        colors = (
            "new Set(new Uint32Array(document.querySelector('.lanes canvas').getContext('2d')"
            ".getImageData(0, 0, 900, 100).data.buffer)).size"
        )
        await page.until(f"{colors} > 5")
        await page.press("+")
        await page.until_requested("/lanes?from=")

    visit(body)


def test_rollouts_are_filtered_opened_and_compared_by_keyboard(visit: Callable[[Body], None], url: str) -> None:
    rows = "[...document.querySelectorAll('tbody tr a')].map(link => link.hash.split('/rollout/')[1]).join()"

    async def body(page: Page) -> None:
        await page.goto(url + "#/run/made/rollouts")
        await page.until(f"{rows} === '3/0,2/0,2/1,1/0,1/1'")
        await page.fill("[data-field=env]", "calc")
        await page.until(f"{rows} === '2/1'")
        await page.fill("[data-field=env]", "")
        await page.fill("[data-field=error]", "any")
        await page.until(f"{rows} === '3/0'")
        await page.fill("[data-field=error]", "")
        await page.fill("[data-field=q]", "QUICK brown")
        await page.until(f"{rows} === '2/0'")
        await page.press("Enter")
        await page.until("document.body.dataset.ready.includes('/rollout/2/0')")
        await page.until("document.querySelector('.turn.sampled').textContent.includes('the quick brown fox')")
        await page.press("d")
        await page.until("document.querySelector('del')?.textContent === 'quick'")
        await page.until("document.querySelector('ins')?.textContent === 'slow'")
        await page.press("Escape")
        await page.until("document.body.dataset.ready.includes('/rollouts?step=2')")

    visit(body)


def test_tokens_are_colored_by_what_was_recorded(visit: Callable[[Body], None], url: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(url + "#/run/made/rollout/2/0?view=tokens")
        await page.until("document.querySelectorAll('.tok').length === 10")
        await page.until("document.querySelectorAll('.tok.context').length === 5")
        fills = (
            "new Set([...document.querySelectorAll('.tok:not(.context)')].map(one => one.style.backgroundColor)).size"
        )
        said = "document.querySelector('[role=status].mono').textContent"
        await page.until(f"{fills} === 5")
        await page.fill("#shade", "version")
        await page.until(f"{fills} === 2")
        await page.ask("document.querySelectorAll('.tok:not(.context)')[3].focus()")
        await page.until(f"{said}.includes('logprob -4')")
        await page.until(f"{said}.includes('ratio 2 ')")
        await page.fill("#shade", "ratio")
        first = "document.querySelector('.tok:not(.context)').style.backgroundColor"
        await page.until(f"{first}.startsWith('rgba(18, 128')")
        await page.goto(url + "#/run/made/rollout/3/0?view=tokens")
        await page.until(f"{said}.includes('kept no logprobs')")
        await page.fill("#shade", "logprob")

    visit(body)


def test_hostile_and_huge_rollouts_do_no_harm(visit: Callable[[Body], None], url: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(url + "#/run/made/rollout/1/0")
        said = await page.until("document.querySelector('.turn.sampled')?.textContent")
        assert "<script>window.hacked" in said and "⟨U+202E⟩" in said and "calculator" in said
        await page.goto(url + "#/run/made/rollout/1/1")
        assert 20_000 <= await page.until("document.querySelector('.turn.sampled .text')?.textContent.length") < 21_000
        await page.ask("document.querySelector('.turn.sampled button').click()")
        await page.until("document.querySelector('.turn.sampled .text').textContent.length === 1_000_000")
        for tab in (
            "rollout/1/0?diff=1",
            "rollout/1/1?view=raw",
            "rollouts?q=script",
            "logs/trainer_001.log",
            "settings",
        ):
            await page.goto(f"{url}#/run/made/{tab}")
        await page.goto(url)
        await page.until("document.querySelectorAll('tbody tr').length === 3")
        assert await page.ask(
            "window.hacked === undefined && document.querySelectorAll('main script, main img').length === 0"
        )

    visit(body)


def test_logs_follow_and_search(visit: Callable[[Body], None], url: str, outputs: Path) -> None:
    async def body(page: Page) -> None:
        await page.goto(url + "#/run/made/logs/trainer_001.log")
        await page.until("document.querySelector('.log .warn')?.textContent === 'WARNING two'")
        await page.live()
        with (outputs / "made" / "logs" / "trainer_001.log").open("a") as file:
            file.write("three\n")
        await page.until("document.querySelector('.log').lastElementChild.textContent === 'three'")
        await page.fill("[data-search]", "TWO")
        await page.until("document.querySelectorAll('.log div').length === 1")

    visit(body)


def test_it_reads_on_a_phone_and_in_the_dark(visit: Callable[[Body], None], url: str) -> None:
    async def body(page: Page) -> None:
        await page.size(390, 800, mobile=True)
        for path in ("", "#/run/made", "#/run/made/rollouts", "#/run/made/lanes", "#/run/made/rollout/2/0?diff=1"):
            await page.goto(url + path)
            if path == "#/run/made":
                await page.until(f"{PAINTED} > 2")
            await page.until("document.documentElement.scrollWidth <= 390")
        light = await page.ask("getComputedStyle(document.body).backgroundColor")
        await page.press("t")
        await page.until(f"getComputedStyle(document.body).backgroundColor !== {json.dumps(light)}")
        await page.press("t")
        await page.size(1280, 900)

    visit(body)


def test_what_is_gone_is_said(visit: Callable[[Body], None], url: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(url + "#/run/none")
        await page.until("document.body.innerText.includes('Not found')")
        page.errors.clear()  # the browser itself reports the 404

    visit(body)
