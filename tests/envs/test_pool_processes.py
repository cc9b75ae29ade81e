"""The worker pool: every episode comes back exactly once, whatever happens to the workers."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from scripted_engine import ScriptedEngine, serving, tiny_model

from headway.base.errors import HeadwayError
from headway.config.orchestrator import EnvSettings, WorkerSettings
from headway.core.episodes import EpisodeRequest, Task
from headway.envs.workers.pool import EnvPool

ENVIRONMENTS = Path(__file__).parent / "pool_environments.py"


def settings(name="Echo", workers=None, **args) -> EnvSettings:
    workers = workers or WorkerSettings(min=1, max=1)
    return EnvSettings(id=f"{ENVIRONMENTS}:{name}", name="env", args=args, workers=workers)


def ask(number: int, url: str, timeout: float = 20.0, **data) -> EpisodeRequest:
    return EpisodeRequest(f"e{number}", "g", Task(str(number), {"word": "w", **data}), [url], timeout=timeout)


others: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _note_others() -> None:
    """Processes that are there before a test belong to other tests' fixtures."""
    others.clear()
    others.update(psutil.Process().children(recursive=True))


def children() -> list[psutil.Process]:
    started = set(psutil.Process().children(recursive=True)) - others
    alive = []
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def workers_of(pool: EnvPool) -> list[int]:
    pids = []
    for process in children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "headway.envs.workers.worker" in " ".join(process.cmdline()):
                pids.append(process.pid)
    return pids


async def until(condition) -> None:
    for _ in range(2400):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never came to pass")


def with_pool(tmp_path, body, env: EnvSettings, script=lambda request, prompt: "w", **options):
    """Run `body(pool, url)` with a served engine and a started pool, and check that no process is left."""

    async def main():
        async with serving(ScriptedEngine(script)) as url:
            pool = EnvPool(env, model=tiny_model(tmp_path), **options)
            await pool.start()
            try:
                return await body(pool, url)
            finally:
                await pool.close()

    result = asyncio.run(main())
    assert children() == []
    return result


def test_episodes_carry_what_the_engine_sent(tmp_path):
    async def body(pool, url):
        assert [task.data["word"] for task in pool.tasks] == ["w0", "w1", "w2"]
        return await asyncio.gather(*(pool.run(ask(i, url)) for i in range(20)))

    episodes = with_pool(tmp_path, body, settings(n=3))
    assert [episode.id for episode in episodes] == [f"e{i}" for i in range(20)]
    for episode in episodes:
        assert episode.error is None
        assert episode.env == "env"
        assert episode.reward == 1.0
        assert set(episode.timings) == {"total", "engine", "environment", "reward"}


def test_a_request_that_cannot_be_sent_is_an_error_of_its_own(tmp_path):
    async def body(pool, url):
        assert (await pool.run(ask(0, url, odd=object()))).error.kind == "environment"
        assert (await pool.run(ask(1, url))).error is None

    with_pool(tmp_path, body, settings())


def test_a_dead_worker_is_replaced_and_its_episodes_are_errors(tmp_path):
    async def body(pool, url):
        killer, *others = await asyncio.gather(
            pool.run(ask(0, url, do="die")), *(pool.run(ask(i, url, do="sleep")) for i in range(1, 4))
        )
        assert {e.error.kind for e in (killer, *others)} == {"worker"}
        assert (await pool.run(ask(9, url))).error is None
        assert (pool.size, pool.restarts) == (1, 1)

    with_pool(tmp_path, body, settings())


def test_what_a_worker_started_dies_with_it(tmp_path):
    def left() -> list[int]:
        return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "600.25"]]

    async def body(pool, url):
        assert (await pool.run(ask(0, url, do="die and leave a child"))).error.kind == "worker"
        await until(lambda: not left())

    with_pool(tmp_path, body, settings())


def daemons() -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if "600.125" in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def test_what_environments_start_ends_with_workers_that_end_in_good_order(tmp_path):
    async def body(pool, url):
        await pool.run(ask(0, url, do="start a daemon"))
        assert len(daemons()) == 2

    with_pool(tmp_path, body, settings())
    assert not daemons()


def test_what_environments_start_ends_when_their_owner_is_killed(tmp_path):
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_pool_processes import *
async def main():
    pool = EnvPool(settings(), model=tiny_model(Path({str(tmp_path)!r})))
    await pool.start()
    episode = asyncio.create_task(pool.run(ask(0, "http://127.0.0.1:9", do="start a daemon")))
    await until(lambda: len(daemons()) == 2)
    print(len(daemons()), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout.readline().strip() == "2"
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 120
    while daemons():
        assert time.monotonic() < deadline, "they outlived the run"
        time.sleep(0.05)


def test_workers_get_no_secrets_unless_they_are_named(tmp_path, monkeypatch):
    for name in ("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HEADWAY_TOKEN", "JUDGE_KEY", "MY_THING"):
        monkeypatch.setenv(name, "x")
    file = tmp_path / "variables"

    async def body(pool, url):
        pass

    named = WorkerSettings(min=1, max=1, pass_env=["JUDGE_KEY", "HEADWAY_TOKEN"])
    with_pool(tmp_path, body, settings("Variables", workers=named, file=str(file)))
    got = set(file.read_text().split())
    assert {"PATH", "HOME", "JUDGE_KEY"} <= got
    assert not got & {"OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HEADWAY_TOKEN", "MY_THING"}


def test_a_hung_event_loop_is_found_by_its_missing_heartbeat(tmp_path):
    async def body(pool, url):
        episode = await pool.run(ask(0, url, do="hang"))
        assert episode.error.kind == "worker"
        assert "hung" in episode.error.message
        assert (await pool.run(ask(1, url))).error is None

    with_pool(tmp_path, body, settings(), heartbeat=3.0)  # a busy machine may hold one up for a second


def test_timeouts_and_cancellation_free_their_places(tmp_path):
    workers = WorkerSettings(min=1, max=1, episodes=2)

    async def body(pool, url):
        slow = asyncio.create_task(pool.run(ask(0, url, do="sleep")))
        late = await pool.run(ask(1, url, timeout=0.2, do="sleep"))
        assert late.error.kind == "timeout"
        waiting = [asyncio.create_task(pool.run(ask(i, url, do="sleep"))) for i in (2, 3)]
        await asyncio.sleep(0.05)
        for task in (slow, *waiting):
            task.cancel()
        done = await asyncio.gather(slow, *waiting, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in done)
        assert (await pool.run(ask(4, url))).error is None

    with_pool(tmp_path, body, settings(workers=workers))


def test_an_episode_that_ignores_cancellation_is_given_up_with_its_worker(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.envs.workers.pool.GRACE_SECONDS", 0.3)

    async def body(pool, url):
        stuck = await pool.run(ask(0, url, timeout=0.2, do="ignore"))
        assert stuck.error.kind == "timeout"
        first = workers_of(pool)
        assert (await pool.run(ask(1, url))).error is None
        await until(lambda: first[0] not in workers_of(pool))

    monkeypatch.setattr("headway.envs.workers.process.STOP_SECONDS", 0.5)
    with_pool(tmp_path, body, settings(), heartbeat=5.0)


def test_leaving_by_exit_and_floods_of_output_do_no_harm(tmp_path, caplog):
    async def body(pool, url):
        left = await pool.run(ask(0, url, do="exit"))
        assert left.error.kind == "environment"
        assert "SystemExit" in left.error.message
        assert (await pool.run(ask(1, url, do="print"))).error is None
        assert pool.restarts == 0

    with caplog.at_level("INFO", logger="headway.envs.workers.output"):
        with_pool(tmp_path, body, settings())
    lines = [record.getMessage() for record in caplog.records if record.name == "headway.envs.workers.output"]
    assert any(line.endswith("x" * 2000) for line in lines)
    assert any("lines of output were dropped" in line for line in lines)
    assert sum(map(len, lines)) < 20_000


def test_memory_is_limited(tmp_path):
    workers = WorkerSettings(min=1, max=1, memory_gb=1.5)

    async def body(pool, url):
        greedy = await pool.run(ask(0, url, do="memory"))
        assert greedy.error.kind == "worker"
        assert (await pool.run(ask(1, url))).error is None

    with_pool(tmp_path, body, settings(workers=workers))


def test_the_pool_grows_with_the_work_and_shrinks_after_it(tmp_path):
    workers = WorkerSettings(min=1, max=3, episodes=2)

    async def body(pool, url):
        async def ask_until_it_grew(i):
            while pool.size < 3:
                assert (await pool.run(ask(i, url))).error is None

        assert pool.size == 1
        await asyncio.gather(*(ask_until_it_grew(i) for i in range(12)))
        await until(lambda: pool.size == 1)
        assert (await pool.run(ask(99, url))).error is None

    with_pool(tmp_path, body, settings(workers=workers, delay=0.3), idle_seconds=0.5)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("NoTasks", {}, "has no tasks"),
        ("Twins", {"required": 1}, "two tasks with the id 'a'"),
        ("Unsendable", {"required": 1}, "failed to start: TypeError"),
        ("NotTasks", {"required": 1}, "must give Task objects, not str"),
        ("Untyped", {}, "parameter 'where' needs a type"),
        ("Toolless", {}, "has no tools"),
        ("Missing", {}, "has no class or function Missing"),
        ("NotAnEnvironment", {}, "not a headway Environment"),
        ("Needy", {}, "required"),
        ("Echo", {"nonsense": 1}, "nonsense"),
    ],
)
def test_an_environment_that_cannot_serve_is_one_line_at_start(tmp_path, name, args, message):
    with pytest.raises(HeadwayError, match=message) as caught:
        with_pool(tmp_path, None, settings(name, **args))
    assert "\n" not in str(caught.value)
    assert children() == []


def test_a_worker_full_of_hung_tools_is_replaced_without_losing_an_episode(tmp_path):
    def script(request, prompt):
        return '<tool_call>\n{"name": "wait"}\n</tool_call>' if "<tool_response>" not in prompt else "so what"

    async def body(pool, url):
        first = workers_of(pool)
        for number in range(9):
            assert (await pool.run(ask(number, url))).error is None
        await until(lambda: workers_of(pool) != first and pool.size == 1)
        assert (await pool.run(ask(9, url))).error is None
        assert pool.restarts == 0

    with_pool(tmp_path, body, settings("Hanging"), script, heartbeat=5.0)


def test_when_no_worker_starts_any_more_episodes_are_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.envs.workers.pool.FIRST_BACKOFF", 0.01)
    broken = tmp_path / "broken"

    async def body(pool, url):
        broken.touch()
        killed = await pool.run(ask(0, url, do="die"))
        waiting = await pool.run(ask(1, url))
        assert (killed.error.kind, waiting.error.kind) == ("worker", "worker")
        assert "no worker can be started" in waiting.error.message
        assert "the data is gone" in waiting.error.message
        broken.unlink()
        await until(lambda: pool.size == 1)
        assert (await pool.run(ask(2, url))).error is None

    with_pool(tmp_path / "model", body, settings("Fragile", broken=str(broken)))


def test_closing_gives_back_what_still_runs(tmp_path):
    async def body(pool, url):
        running = [asyncio.create_task(pool.run(ask(i, url, do="sleep"))) for i in range(3)]
        await asyncio.sleep(0.2)
        await pool.close()
        outcomes = await asyncio.gather(*running, pool.run(ask(9, url)))
        assert [episode.error.kind for episode in outcomes] == ["cancelled"] * 3 + ["worker"]

    with_pool(tmp_path, body, settings())


@pytest.mark.parametrize("episodes", [150, pytest.param(500, marks=pytest.mark.slow)])
def test_every_episode_has_an_outcome_while_workers_are_killed_at_random(tmp_path, episodes):
    chance = random.Random(0)
    workers = WorkerSettings(min=2, max=2, episodes=16)

    async def body(pool, url):
        outcomes = []
        work = [asyncio.create_task(pool.run(ask(i, url))) for i in range(episodes)]
        for done in asyncio.as_completed(work):
            outcomes.append(await done)
            # By count, not by the clock: a fast machine must see its share of kills too.
            if chance.random() < 0.05 and (pids := workers_of(pool)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(pids), signal.SIGKILL)
        await until(lambda: pool.size == 2)
        assert pool.restarts > 0
        return outcomes

    outcomes = with_pool(tmp_path, body, settings(workers=workers, delay=0.02))
    assert sorted(int(episode.id[1:]) for episode in outcomes) == list(range(episodes))
    kinds = {episode.error.kind for episode in outcomes if episode.error is not None}
    assert kinds == {"worker"}
    assert all(episode.reward == 1.0 for episode in outcomes if episode.error is None)


def test_workers_die_with_a_pool_that_is_killed(tmp_path):
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_pool_processes import *
async def main():
    pool = EnvPool(settings(workers=WorkerSettings(min=2, max=2)), model=tiny_model(Path({str(tmp_path)!r})))
    await pool.start()
    asyncio.create_task(pool.run(ask(0, "http://127.0.0.1:9", do="hang")))
    await asyncio.sleep(0.3)
    print(*workers_of(pool), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers outlived their pool"
        time.sleep(0.1)
