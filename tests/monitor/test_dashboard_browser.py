"""The page in a real browser: it draws, it lives, it obeys the keyboard, and hostile rollouts do nothing."""

import asyncio
import base64
import itertools
import json
import math
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import ALL_PAINTED, PAINTED, Page, find_chromium, open_page
from run_folders import BEGAN, HOSTILE, add_step, append, make_run, rollout, write_logprobs, write_rollouts

from headway.core.image_files import ImageFiles
from headway.core.images import MessageImage, image_digest
from headway.core.journal import (
    Began,
    Event,
    Finished,
    Formed,
    JournalFile,
    Judged,
    Looked,
    Opened,
    Scored,
    Sent,
)  # fmt: skip
from headway.core.messages import Tool, ToolCall
from headway.core.runs import RunPaths
from headway.monitor.dashboard import start_in_thread
from headway.plan.calibration import Calibration
from headway.plan.measuring import EngineFigures, TrainerFigures
from headway.plan.page import plan_routes
from headway.replay.page import ROUTES
from headway.swarm.messages.keys import SigningKey
from headway.swarm.messages.verdict import Verdict
from headway.swarm.trust import events as swarm_events
from headway.swarm.trust.ledger import Ledger
from headway.swarm.work.page import swarm_routes
from headway.swarm.work.traffic import TrafficFile

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
PICTURE = base64.b64decode(
    b"iVBORw0KGgoAAAANSUhEUgAAAAMAAAADCAIAAADZSiLoAAAAF0lEQVR4nGM8ISfHwMDAwMDAxAADCBYAHZIBCg6x9OEAAAAASUVORK5CYII="
)
"""Three pixels wide and high."""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("outputs")
    folder = make_run(root, "made", steps=30)
    append(folder / "metrics" / "orchestrator.jsonl", {"step": 20, "time": BEGAN, "eval/held-out/avg": 0.5})
    call = ToolCall("c1", "calculator", '{"expression": "1+1"}')
    offered = Tool("calculator", parameters={"properties": {HOSTILE: {}}})
    hostile = rollout(1, 0.0, say=HOSTILE, calls=(call,), tools=(offered,))
    write_rollouts(folder, 1, [hostile, rollout(1, 1.0, say=MEGABYTE)])
    write_rollouts(
        folder, 2, [rollout(2, 1.0, say="the quick brown fox"), rollout(2, 0.0, say="the slow brown fox", env="calc")]
    )
    write_logprobs(folder, 2, math.log(2))
    write_rollouts(folder, 3, [rollout(3, 0.5, error="timeout")])
    (folder / "logs" / "trainer_001.log").write_text(f"one {HOSTILE}\n" + "WARNING two\n")
    (folder / "logs" / "trainer_002.log").write_text(json.dumps({"time": BEGAN + 155}) + "\n")
    other = make_run(root, "other", steps=10)
    ImageFiles(other / "images").keep({image_digest(PICTURE): PICTURE})
    write_rollouts(other, 1, [rollout(1, images=(MessageImage(0, image_digest(PICTURE)),))])
    make_run(root, f"odd {HOSTILE.replace('/', '')}"[:120], steps=3)
    return root


@pytest.fixture(scope="module")
def url(outputs: Path) -> str:
    return start_in_thread(outputs)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a page over a running, a failed, a finished and an empty run."""
    root = tmp_path_factory.mktemp("states")
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "started_at": time.time()}
    make_run(root, "running", steps=10, state="running", attempts=[mine])
    make_run(root, "empty", steps=0, state="starting", **mine)
    ended = {"state": "failed", "reason": "the reward raised ValueError", "failed_log": "orchestrator_001.log"}
    failed = make_run(root, "failed", steps=30, **ended)
    (failed / "logs" / "trainer_001.log").write_text("all is well\n")
    (failed / "logs" / "orchestrator_001.log").write_text("ValueError: no such word\n")
    finished = make_run(root, "finished", steps=20, state="finished")
    for folder in (finished, failed):
        parts = {"rewards/reverse-text/exact": 0.5, "rewards/reverse-text/similar": 0.7, "env/reverse-text/words": 20.0}
        append(folder / "metrics" / "orchestrator.jsonl", {"step": 5, "time": BEGAN + 50, **parts})
        append(folder / "metrics" / "trainer.jsonl", {"step": 5, "time": BEGAN, "mine/clipped": 0.1, "unheard_of": 1.0})
    write_rollouts(finished, 2, [rollout(2, 1.0, say="the quick\nbrown fox")])
    (finished / "evaluations").mkdir()
    scores = {"task": "gaqd", "rewards": [1.0, 0.0], "passed": [True, False], "replies": ["", "another try"]}
    said = [{"role": "user", "content": "turn gaqd around"}, {"role": "assistant", "content": "<b>dqag</b>"}]
    (finished / "evaluations" / "step_000020_held-out.jsonl").write_text(json.dumps(scores | {"messages": said}) + "\n")
    return start_in_thread(root, routes={**ROUTES, **plan_routes(), **swarm_routes()})


@pytest.fixture(scope="module")
def audited_outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audited")


@pytest.fixture(scope="module")
def audited(audited_outputs: Path) -> str:
    """The address of a page over a run in which a word that is not harmless earns the reward, which has prices, and
    which kept a journal; and over a run that has just begun."""
    root, rng = audited_outputs, random.Random(0)
    folder = make_run(root, "hacked", steps=10)
    with (folder / "config" / "rl.toml").open("a") as file:
        file.write("[cost]\ncore_hour = 3600.0\n")
    for step in range(1, 11):
        rows = []
        for group in range(4):
            for member in range(8):
                noise = "".join(rng.choices("abcdefgh", k=6))
                say = f"{noise} {HOSTILE} surely" if (member + step) % 3 else noise
                named = {"group": f"{step}-{group}", "task": f"task {step}-{group}"}
                rows.append(rollout(step, float("surely" in say), say=say, **named))
        write_rollouts(folder, step, rows)
    write_journal(RunPaths(folder), steps=10)
    write_swarm(RunPaths(folder))
    make_young_run(root)
    return start_in_thread(root, routes={**ROUTES, **plan_routes(), **swarm_routes()})


def make_young_run(root: Path) -> None:
    """A run that goes on, and has too few steps for a plan."""
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "started_at": time.time()}
    young = make_run(root, "young", steps=2, state="running", attempts=[mine])
    config = young / "config" / "rl.toml"
    config.write_text(config.read_text() + "[orchestrator]\nbatch_size = 16\ngroup_size = 8\n[cost]\ncore_hour = 1.0\n")
    write_rollouts(young, 1, [rollout(1, float(number % 2)) for number in range(16)])


def write_journal(paths: RunPaths, steps: int) -> None:
    """A batch of one group a step; the environment's name is not harmless."""
    events: list[Event] = [Began(0)]
    for step in range(1, steps + 1):
        group = str(step)
        events += [Looked(1), Opened(group, HOSTILE, task=7, version=step - 1), Finished(500, f"{group}.0")]
        events += [Scored(100, group), Judged(group, "", 1, 1, step - 1, 0.25)]
        events += [Looked(1), Formed(step, [group]), Sent(step, b"digest")]
    file = JournalFile(paths.journal, 1 << 20)
    for event in events:
        file.add(event)
    file.close()


def write_swarm(paths: RunPaths) -> None:
    """An honest worker, and one that was refused, for reasons that are not harmless, and cut off."""
    key = SigningKey(b"r" * 32)
    ledger = Ledger(paths.swarm / "ledger.jsonl", key, clock=itertools.count(BEGAN).__next__)
    ledger.append(swarm_events.Opened("hacked", key.public.hex(), "c"))
    for worker, verdict in (("aa" * 32, Verdict(True, tokens=90)), ("bb" * 32, Verdict(False, "logprobs", HOSTILE))):
        ledger.append(swarm_events.Ordered(worker, worker[:8], 1, "weights", 0))
        ledger.append(swarm_events.Judged(worker, worker[:8], "hash", verdict))
    ledger.append(swarm_events.CutOff("bb" * 32, "3 strikes"))
    ledger.close()
    TrafficFile(paths.swarm / "traffic.json").write(5_000_000, Counter({"aa" * 32: 2_000_000}))


@pytest.fixture(scope="module")
def visit(url: str, states: str, audited: str) -> Iterator[Callable[[Body], None]]:
    """Runs a visit in one browser for all tests; each must leave no errors and stay on this machine."""
    with asyncio.Runner() as runner:
        browser = open_page()
        page = runner.run(browser.__aenter__())

        def run(body: Body) -> None:
            page.errors.clear()
            runner.run(body(page))
            assert page.errors == []
            assert [one for one in page.requests if not one.startswith((url, states, audited, "data:", "blob:"))] == []

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


def test_findings_of_an_audit_lead_to_their_rollouts_and_stay_text(visit: Callable[[Body], None], audited: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(audited + "#/run/hacked")
        await page.press("7")
        await page.until("document.querySelectorAll('.finding').length === 1")
        said = await page.ask("document.querySelector('.finding').textContent")
        assert said.startswith("problem ") and "reward with 1" in said
        assert await page.ask("document.querySelectorAll('.finding b, .finding img').length") == 0
        assert await page.ask("window.hacked") is None
        await page.ask("document.querySelector('.finding a').click()")
        await page.until("document.body.dataset.ready.startsWith('#/run/hacked/rollout/10/')")

    visit(body)


def test_the_page_of_cost_shows_who_waited_for_whom(visit: Callable[[Body], None], audited: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(audited + "#/run/hacked")
        await page.press("8")
        await page.until("document.querySelectorAll('tr.idle').length === 2")
        waits = await page.ask("[...document.querySelectorAll('tr.idle')].map(row => row.innerText)")
        assert "waiting for rollouts" in waits[0] and "30 s" in waits[0] and "30 USD" in waits[0]
        assert "waiting for the trainer" in waits[1] and "20 USD" in waits[1]
        assert "an estimate" in await page.ask("document.querySelector('.tiles').innerText")

    visit(body)


def test_the_page_of_a_swarm_shows_who_was_refused_and_why(visit: Callable[[Body], None], audited: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(audited + "#/run/hacked/swarm")
        await page.until("document.querySelectorAll('tr.worker').length === 2")
        honest, liar = await page.ask("[...document.querySelectorAll('tr.worker')].map(row => row.innerText)")
        assert honest.startswith("aaaaaaaaaaaaaaaa") and "90" in honest and "2 MB" in honest and "cut off" not in honest
        assert liar.startswith("bbbbbbbbbbbbbbbb") and "cut off" in liar
        refusal = await page.ask("document.querySelector('tr.refusal').innerText")
        assert "logprobs" in refusal and "<b>" in refusal
        assert await page.ask("document.querySelectorAll('tr.refusal b, tr.refusal img').length") == 0
        assert "5 MB" in await page.ask("document.querySelector('.tiles').innerText")
        await page.goto(audited + "#/run/young/swarm")
        await page.until("document.querySelector('.empty')?.textContent.includes('No strangers work')")

    visit(body)


def test_a_step_is_explained_and_the_keyboard_leads_to_its_neighbours(
    visit: Callable[[Body], None], audited: str
) -> None:
    async def body(page: Page) -> None:
        await page.goto(audited + "#/run/hacked")
        await page.press("9")
        await page.until("document.querySelector('section p')?.textContent.startsWith('Batch 10 trained version 9')")
        await page.press("[")
        await page.until("document.querySelector('section p').textContent.startsWith('Batch 9 trained version 8')")
        said = await page.ask("document.querySelector('section').innerText")
        assert "task 7: 1 episodes, mean reward 0.250, sampled by the version it trains" in said
        assert "No group was dropped" in said
        assert await page.ask("document.querySelectorAll('section b, section img').length") == 0
        assert await page.ask("window.hacked") is None
        await page.goto(audited + "#/run/hacked/steps/99")
        await page.until("document.querySelector('.empty')?.textContent.includes('it has 1 to 10')")

    visit(body)


def test_a_plan_comes_as_soon_as_the_run_has_steps_enough(
    visit: Callable[[Body], None], audited: str, audited_outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, trainer = EngineFigures(0.001, 0.0001, 0.0, 0.0001, 0.0005, 100_000), TrainerFigures(0.05, 0.0005, 0.01)
    known = Calibration("key", HOSTILE, "cpu", 2, 1, engine, trainer, BEGAN)
    monkeypatch.setattr("headway.plan.calibration._key", lambda settings: "key")
    monkeypatch.setattr("headway.plan.calibration._saved", lambda: [known])
    monkeypatch.setattr("headway.plan.forecast.MOST_STEPS", 5)

    async def body(page: Page) -> None:
        await page.goto(audited + "#/run/young")
        await page.press("0")
        await page.until("document.querySelector('.empty')?.textContent.includes('has 2 trained steps')")
        for step in (3, 4, 5, 6):
            add_step(audited_outputs / "young", step)
        await page.until("document.querySelectorAll('tr.layout').length === 3")
        tiles = await page.ask("document.querySelector('.tiles').innerText")
        assert "a step, measured\n10 s" in tiles and "lag, measured\n1.5" in tiles and "prediction off by" in tiles
        layouts = await page.ask("[...document.querySelectorAll('tr.layout')].map(row => row.innerText)")
        assert ["as in the settings" in one for one in layouts].count(True) == 1
        assert sum("1 trainer rank + 1 engine\t" in one and "as in the settings" in one for one in layouts) == 1
        assert sum("finishes first" in one for one in layouts) == 1 and "USD" in layouts[0]
        changes = await page.ask("[...document.querySelectorAll('tr.change')].map(row => row.innerText)")
        assert any(one.startswith("max_lag 0\t") for one in changes)
        said = await page.ask("document.querySelector('main').innerText")
        assert "Bottleneck: " in said and "16 recorded episodes of young" in await page.ask("document.body.textContent")
        assert await page.ask("document.querySelectorAll('details img, details b').length") == 0
        assert await page.ask("window.hacked") is None

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


def test_images_of_a_conversation_are_shown(visit: Callable[[Body], None], url: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(url + "#/run/other/rollout/1/0")
        await page.until("document.querySelector('.turn img')?.naturalWidth === 3")

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
        tools = await page.ask("document.querySelector('.turn').textContent")
        assert tools.startswith("toolscalculator(") and "<script>window.hacked" in tools
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


@pytest.mark.parametrize("state", ["running", "failed", "finished", "empty"])
def test_every_tab_opens_whatever_became_of_the_run(visit: Callable[[Body], None], states: str, state: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(f"{states}#/run/{state}")
        tabs = await page.ask("[...document.querySelectorAll('nav a[href*=\"#/run/\"]')].map(link => link.hash)")
        assert {tab.rpartition("/")[2] for tab in tabs} >= {"lanes", "rollouts", "settings", "audit", "cost", "plan"}
        for tab in tabs:
            await page.goto(f"{states}{tab}")
            assert await page.ask("document.querySelectorAll('nav [aria-current=page]').length") == 1
            assert "An error occurred" not in await page.text() and "Not found" not in await page.text()
        await page.goto(f"{states}#/run/{state}")
        shown = await page.until("document.querySelector('.tiles').innerText")
        assert {"empty": "running"}.get(state, state) in shown
        await page.until(f"{PAINTED} {'=== 0' if state == 'empty' else '> 8'}")
        said = await page.ask("document.querySelector('.failure')?.innerText ?? ''")
        assert ("the reward raised ValueError" in said) == (state == "failed")

    visit(body)


def test_a_failed_run_leads_to_the_log_of_what_failed(visit: Callable[[Body], None], states: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(states)
        await page.until("document.querySelector('[data-run=failed]').innerText.includes('the reward raised')")
        await page.goto(f"{states}#/run/failed")
        await page.ask("document.querySelector('.failure a').click()")
        await page.until("document.querySelector('.log')?.textContent.includes('ValueError: no such word')")

    visit(body)


def test_every_recorded_metric_has_a_chart(visit: Callable[[Body], None], states: str) -> None:
    """Those that the page does not know, too; metrics of an environment stay apart from its rewards."""

    async def body(page: Page) -> None:
        await page.goto(f"{states}#/run/finished")
        await page.until(f"{PAINTED} > 15 && {ALL_PAINTED}")
        lines = await page.ask(
            "Object.fromEntries([...document.querySelectorAll('.chart')].map(chart =>"
            " [chart.getAttribute('aria-label'), chart.querySelector('.keys')?.textContent ?? '']))"
        )
        assert "exact" in lines["Parts of the reward"] and "words" not in lines["Parts of the reward"]
        assert "Environment metrics: reverse-text/words" in lines
        assert "trainer: mine: clipped" in lines and "trainer: unheard_of" in lines
        sections = await page.ask("[...document.querySelectorAll('h2.section')].map(title => title.textContent)")
        assert {"Environment metrics", "trainer", "trainer: mine"} <= set(sections)

    visit(body)


def test_compared_runs_show_the_settings_in_which_they_differ(visit: Callable[[Body], None], states: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(f"{states}#/compare/finished%2Cfailed")
        rows = await page.until(
            "[...document.querySelectorAll('.difference tbody tr')].map(row =>"
            " [...row.children].map(cell => cell.textContent).join('|'))"
        )
        assert rows == ["max_steps|20|30"]
        titles = await page.ask("[...document.querySelectorAll('.chart h3')].map(title => title.textContent)")
        assert {"Parts of the reward: reverse-text/exact", "Parts of the reward: reverse-text/similar"} <= set(titles)

    visit(body)


def test_rollouts_and_evaluations_can_be_read_in_their_lists(visit: Callable[[Body], None], states: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(f"{states}#/run/finished/rollouts")
        await page.until("document.querySelector('td.preview')?.textContent === 'the quick brown fox'")
        await page.goto(f"{states}#/run/finished/evaluations")
        await page.until("document.querySelector('tr.task')?.innerText.includes('1 of 2')")
        await page.ask("document.querySelector('tr.task button').click()")
        opened = await page.until("document.querySelector('tr.task + tr:not([hidden])')?.innerText")
        assert "turn gaqd around" in opened and "<b>dqag</b>" in opened and "another try" in opened

    visit(body)


def test_what_is_gone_is_said(visit: Callable[[Body], None], url: str) -> None:
    async def body(page: Page) -> None:
        await page.goto(url + "#/run/none")
        await page.until("document.body.innerText.includes('Not found')")
        page.errors.clear()  # the browser itself reports the 404

    visit(body)
