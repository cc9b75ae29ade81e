"""How the page carries a long run: 10,000 steps and 1,000,000 rollouts, made up, in a real headless Chromium.

    python benchmarks/dashboard.py
    python benchmarks/dashboard.py --steps 1000 --rollouts 100000

Measures the first paint of the run's charts, scrolling before and after they are drawn beside an empty page's, answers
while the rollouts are being indexed, filtering and scrolling once they are, and the largest memory of the server.
Writes benchmarks/results/dashboard.json.
"""

import argparse
import asyncio
import gzip
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "dashboard"))

from chromium import ALL_PAINTED, Page, open_page

BEGAN = 1_794_700_000.0
BARS = {"first_paint_seconds": 2.0, "longest_scroll_frame_cpu_ms": 33.0, "server_peak_mb": 300.0}
SCROLLS = ("charts_first_scroll", "charts_scroll", "rollouts_scroll")
RECORD = (
    '{"step":%d,"env":"%s","group":"%032x","reward":%.3f,"lag":%d,"episode":{"id":"%032x.0","group_id":"%032x",'
    '"env":"%s","task":{"id":"task-%06d","data":{"word":"gaqd"}},"version":%d,"traces":[{"nodes":[{"parent":-1,'
    '"token_ids":[%s],"message":{"role":"user","content":"turn the word around %d"}},{"parent":0,"token_ids":[%s],'
    '"message":{"role":"assistant","content":"this is what sample %d has to say about it"},"logprobs":[%s],'
    '"versions":[[%d,%d]],"finish_reason":"stop","temperature":1.0}],"reward":%.3f,"rewards":{"exact":%.3f}}],'
    '"started_at":%.3f,"timings":{"total":%.3f,"engine":0.9}},"samples":[{"agent":"policy","tokens":56,"sampled":32,'
    '"advantage":%.3f,"versions":[%d,%d]}]}\n'
)
FRAME = "ProxyMain::BeginMainFrame"
"""What the browser calls its work on a frame: scripts, layout, paint, handing over to the compositor."""
FILTERS: list[tuple[str, str, str]] = [
    ("env", "calculator", "wordle"),
    ("min_reward", "0.9", "0.5"),
    ("step", "77", "500"),
    ("max_reward", "0.01", "0.2"),
]


def make_run(folder: Path, steps: int, rollouts: int) -> None:
    chance = random.Random(0)
    for part in ("metrics", "rollouts", "logs", "config"):
        (folder / part).mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"command": "rl", "argv": ["rl"], "started_at": BEGAN}))
    (folder / "config" / "rl.toml").write_text(f"max_steps = {steps}\n")
    with (folder / "metrics" / "trainer.jsonl").open("w") as trainer:
        trainer.writelines(json.dumps(trainer_line(step, chance)) + "\n" for step in range(1, steps + 1))
    with (folder / "metrics" / "orchestrator.jsonl").open("w") as orchestrator:
        orchestrator.writelines(json.dumps(orchestrator_line(step, chance)) + "\n" for step in range(1, steps + 1))
    prompt = ",".join(str(token) for token in range(100, 124))
    reply = ",".join(str(token) for token in range(200, 232))
    logprobs = ",".join(f"-{chance.random():.6f}" for _ in range(32))
    for step in range(1, steps + 1):
        lines = [record(step, n, chance, prompt, reply, logprobs) for n in range(rollouts // steps)]
        path = folder / "rollouts" / f"step_{step:06d}.jsonl.gz"
        path.write_bytes(gzip.compress("".join(lines).encode(), compresslevel=1, mtime=0))


def record(step: int, n: int, chance: random.Random, prompt: str, reply: str, logprobs: str) -> str:
    env, group, reward = (
        ("reverse-text", "calculator", "wordle")[n % 3],
        step * 1000 + n // 8,
        round(chance.random(), 3),
    )
    return RECORD % (
        step, env, group << 96, reward, n % 5, n, group << 96, env, group, step, prompt, n, reply, n, logprobs, step,
        32, reward, reward, BEGAN + 10 * step, chance.random() * 9, reward - 0.5, step, step,
    )  # fmt: skip


def trainer_line(step: int, chance: random.Random) -> dict[str, float]:
    names = (
        "loss loss/rl rl/masked mismatch_kl entropy grad_norm lr tokens packed_tokens sampled_tokens publish_seconds "
        "publish_bytes wait_seconds tokens_per_second peak_memory_gib skipped"
    )
    values = {name: chance.random() for name in names.split()}
    return {"step": step, "time": BEGAN + 10 * step, "step_seconds": 5.0 + chance.random(), **values}


def orchestrator_line(step: int, chance: random.Random) -> dict[str, float]:
    summaries = [f"{name}/{part}" for name in ("reward", "length", "turns") for part in ("mean", "p10", "p50", "p90")]
    lags = [f"lag/{part}" for part in ("mean", "max", "in_flight_mean", "in_flight_max", "in_queue_mean")]
    envs = [f"reward/{env}/mean" for env in ("reverse-text", "calculator", "wordle")]
    others = (
        "tokens_per_second sampled_tokens episodes pass_rate truncated wait_for_trainer_seconds dropped/share "
        "dropped/stale dropped/zero_advantage errors/share errors/timeout cancelled/share weights/update_seconds "
        "in_flight useful_share concurrency_cap ready_episodes version batch/tokens episode_seconds/engine "
        "episode_seconds/environment episode_seconds/reward workers/serving workers/lost"
    )
    values = {name: chance.random() for name in (*summaries, *lags, *envs, *others.split())}
    if step % 100 == 0:
        values |= {"eval/held-out/avg": chance.random(), "eval/held-out/pass@1": chance.random()}
    return {"step": step, "time": BEGAN + 10 * step - 3, "step_seconds": 9.0, **values}


async def measure(url: str, pid: int, steps: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    async with open_page() as page:
        await page.send("Page.navigate", url="about:blank")
        await page.ask("document.body.style.height = '6000px'")
        out["empty_scroll"] = await scroll(page)
        out["runs_table_seconds"] = await first_paint(page, url, "document.querySelectorAll('tbody tr a').length")
        painted = "document.querySelectorAll('.u-over').length >= 6"
        out["first_paint_seconds"] = await first_paint(page, url + "#/run/long", painted)
        out["again_paint_seconds"] = await first_paint(page, url + "#/run/long", painted)
        out["charts_first_scroll"] = await scroll(page)
        await page.until(ALL_PAINTED)
        out["charts_scroll"] = await scroll(page)
        out["while_indexing"] = await indexing(url, steps)
        await page.goto(url + "#/run/long/rollouts")
        out["filter_seconds"] = await filtering(page)
        out["rollouts_scroll"] = await scroll(page)
        for name in SCROLLS:
            floor = out["empty_scroll"]["frames_per_second"]
            out[name]["of_empty_page"] = round(out[name]["frames_per_second"] / floor, 3)
        out["errors"] = page.errors
    out["longest_scroll_frame_cpu_ms"] = max(out[name]["longest_frame_cpu_ms"] for name in SCROLLS)
    out["server_queries"] = [timed_query(url, query) for query in QUERIES]
    out["server_peak_mb"] = peak_megabytes(pid)
    return out


QUERIES = (
    "sort=reward",
    "sort=reward&order=asc&env=wordle",
    "min_reward=0.5",
    "offset=900000",
    "step=5000",
    "q=sample+99",
)


async def first_paint(page: Page, url: str, painted: str) -> float:
    """Seconds from an empty page until what was asked for is drawn, with nothing in the browser's cache."""
    await page.send("Page.navigate", url="about:blank")
    await page.send("Network.clearBrowserCache")
    began = time.perf_counter()
    await page.send("Page.navigate", url=url)
    await page.until(painted, 60)
    return round(time.perf_counter() - began, 3)


async def scroll(page: Page) -> dict[str, float]:
    """Frames while a page scrolls for two seconds: how many a second, the longest time between two, and the processor
    time that the usual and the longest one took of the page's main thread, which a busy machine does not change."""
    frames = page.ask(
        "new Promise(done => { scrollTo(0, 0); const times = [];"
        " const tick = now => { times.push(now); scrollBy(0, 24);"
        " times.at(-1) - times[0] < 2000 ? requestAnimationFrame(tick) : done(times); };"
        " requestAnimationFrame(tick); })"
    )
    gaps = [after - before for before, after in pairwise(await page.traced(frames, "cc"))]
    busy = sorted(event["tdur"] / 1000 for event in page.trace if event["name"] == FRAME and "tdur" in event)
    return {
        "frames_per_second": round(1000 * len(gaps) / sum(gaps), 1),
        "longest_frame_ms": round(max(gaps), 1),
        "median_frame_cpu_ms": round(busy[len(busy) // 2], 1),
        "longest_frame_cpu_ms": round(busy[-1], 1),
    }


async def indexing(url: str, steps: int) -> dict[str, Any]:
    """How long the index takes, and how fast charts are answered meanwhile."""
    began, answers = time.perf_counter(), []
    while True:
        start = time.perf_counter()
        await asyncio.to_thread(get, url + "api/runs/long/series?name=trainer:loss&name=orchestrator:reward/mean")
        answers.append(time.perf_counter() - start)
        progress = (await asyncio.to_thread(get, url + "api/runs/long/rollouts?limit=1"))["progress"]
        if progress["indexed"] >= steps:
            break
        await asyncio.sleep(0.5)
    seconds = round(time.perf_counter() - began, 1)
    return {"seconds": seconds, "rollouts": progress["rollouts"], "slowest_answer_seconds": round(max(answers), 3)}


async def filtering(page: Page) -> list[float]:
    """Seconds from a change of a filter until the page shows other rows; 0.15 of them the page waits for more keys."""
    status = (
        "document.querySelector('.bar.pad [role=status]').textContent + document.querySelector('tbody').textContent"
    )
    out = []
    for field, first, second in FILTERS:
        for value in (first, second, ""):
            before = await page.ask(status)
            began = time.perf_counter()
            await page.fill(f"[data-field={field}]", value)
            await page.until(f"{status} !== {json.dumps(before)}")
            out.append(round(time.perf_counter() - began, 3))
    return out


def timed_query(url: str, query: str) -> dict[str, Any]:
    began = time.perf_counter()
    total = get(f"{url}api/runs/long/rollouts?limit=100&{query}")["total"]
    return {"query": query, "total": total, "seconds": round(time.perf_counter() - began, 3)}


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)


def peak_megabytes(pid: int) -> float:
    """The largest resident memory of the process so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return round(int(found[1]) / 1024, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="keep the made-up run here, and use one that is here")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "dashboard.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        outputs = options.folder or Path(made)
        if not (outputs / "long").exists():
            began = time.perf_counter()
            make_run(outputs / "long", options.steps, options.rollouts)
            print(f"made the run in {time.perf_counter() - began:.0f} s", flush=True)
        busy = os.getloadavg()[0]
        command = [sys.executable, "-m", "headway.cli.main", "dash", str(outputs), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                found = re.search(r"http://\S+", server.stdout.readline())
                assert found is not None
                result = asyncio.run(measure(found[0], server.pid, options.steps))
            finally:
                server.terminate()
    result |= {"steps": options.steps, "rollouts": options.rollouts, "machine": platform.machine()}
    result |= {"cores": os.cpu_count(), "load_before": round(busy, 1)}
    result["bars"] = {name: {"bar": bar, "holds": result[name] < bar} for name, bar in BARS.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0 if all(bar["holds"] for bar in result["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
