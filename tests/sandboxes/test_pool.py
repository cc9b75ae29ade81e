"""The pool is bounded and fair; control groups of both kinds; and the sweep removes what the killed left behind."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from leftovers import children, leftovers, swept_clean
from sandbox_kinds import needs_bubblewrap, needs_gvisor

from headway.sandboxes.gate import FairGate
from headway.sandboxes.local.cgroups import ROOT, Cgroups
from headway.sandboxes.local.owners import is_orphan, owned_name, start_time
from headway.sandboxes.local.sweep import sweep
from headway.sandboxes.meters import measured
from headway.sandboxes.pool import SandboxPool
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import Limits


def test_the_gate_is_bounded_and_serves_who_holds_least() -> None:
    async def main() -> list[str]:
        gate, order, most = FairGate(2), [], 0
        go = asyncio.Event()

        async def visit(owner: str) -> None:
            nonlocal most
            async with gate.place(owner):
                order.append(owner)
                most = max(most, gate.held)
                await go.wait()

        visits = [asyncio.ensure_future(visit(owner)) for owner in ("a", "a", "a", "a", "b")]
        await asyncio.sleep(0)
        cancelled = asyncio.ensure_future(visit("c"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        assert order == ["a", "a"]
        go.set()
        await asyncio.gather(*visits)
        assert most == 2 and gate.held == 0
        return order

    # When one place gets free, "a" still holds one and "b" none.
    assert asyncio.run(main())[2] == "b"


def test_names_belong_to_a_process_and_not_to_its_number() -> None:
    assert not is_orphan(owned_name())
    assert is_orphan(f"headway-{os.getpid()}-{(start_time(os.getpid()) or 0) + 1}-0")
    assert not is_orphan("something-else") and not is_orphan("headway-12")
    child = subprocess.Popen(["sleep", "100"])
    name = owned_name(child.pid)
    assert not is_orphan(name)
    child.kill()
    child.wait()
    assert is_orphan(name)


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    own = tmp_path / "me"
    own.mkdir()
    (own / "cgroup.subtree_control").write_text("memory\n")
    groups = Cgroups(tmp_path, "0::/me\n")
    assert groups.version == 2 and groups.problem is None
    assert (own / "cgroup.subtree_control").read_text() == "+cpu +pids"
    group = groups.group("box", Limits(memory=1 << 20, processes=7, cpus=0.5))
    assert group.folders == (own / "box",)
    assert dict(group.settings) == {
        "0/memory.max": "1048576",
        "0/memory.swap.max": "0",
        "0/pids.max": "7",
        "0/cpu.max": "50000 100000",
    }
    (own / "box").mkdir()
    assert group.exceeded() is None
    (own / "box" / "pids.events").write_text("max 3\n")
    assert group.exceeded() == "processes"
    (own / "box" / "memory.events").write_text("low 0\noom_kill 1\n")
    assert group.exceeded() == "memory"


def test_control_groups_that_cannot_be_had_are_said(tmp_path: Path) -> None:
    assert "hands no controllers down" in (Cgroups(tmp_path, "0::/absent\n").problem or "")


@needs_bubblewrap
def test_the_pool_lends_each_sandbox_once_and_keeps_some_warm() -> None:
    recipe = Recipe(files={"a": b"1"})

    async def main() -> None:
        pool = SandboxPool("bubblewrap", most=2, warm=2)
        names = []
        with measured() as meters:
            for _ in range(4):
                async with pool.sandbox(recipe) as box:
                    names.append(box.name)
                    assert (await box.run(["sh", "-c", "cat a; ls"])).stdout == "1a\n"
                    await box.write("b", b"")
        await pool.close()
        assert len(set(names)) == 4
        assert meters.sums["starts"] == meters.sums["commands"] == 4

    asyncio.run(main())


WORKER = """
import asyncio, sys
from headway.sandboxes.pool import SandboxPool
from headway.sandboxes.recipe import Recipe
async def main():
    pool = SandboxPool(sys.argv[1], most=8, warm=2)
    async def episode(n):
        while True:
            async with pool.sandbox(Recipe(files={"a": b"1"})) as box:
                await box.background(["sh", "-c", "setsid sleep 86400 & sleep 86400"], log="log")
                await box.run(["sh", "-c", "cat a > b"])
                print("episode", flush=True)
    await asyncio.gather(*(episode(n) for n in range(6)))
asyncio.run(main())
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        pytest.param("bubblewrap", 6, marks=needs_bubblewrap),
        pytest.param("bubblewrap", 30, marks=[needs_bubblewrap, pytest.mark.slow]),
        pytest.param("gvisor", 9, marks=[needs_gvisor, pytest.mark.slow]),
    ],
)
def test_nothing_is_left_after_kill_9_of_anyone(kind: str, rounds: int) -> None:
    rng = random.Random(rounds)
    for attempt in range(rounds):
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, kind], stdout=subprocess.PIPE, start_new_session=True, text=True
        )
        assert worker.stdout is not None
        for _ in range(rng.randint(1, 30 if kind == "bubblewrap" else 6)):
            assert worker.stdout.readline()
        assert leftovers(worker.pid)  # the check can fail
        if attempt % 3 == 2:  # the launcher, and then the worker that lost it
            launcher = next(int(pid) for pid in children(worker.pid))
            os.kill(launcher, signal.SIGKILL)
        elif attempt % 3 == 1:  # any process that belongs to it, and then the worker
            victims: list[int] = []
            while not victims:  # one sandbox may have ended, and the next not begun
                victims = [int(path.split("/")[2]) for path in leftovers(worker.pid) if path.startswith("/proc/")]
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(victims), signal.SIGKILL)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        assert swept_clean(worker.pid)


@needs_bubblewrap
@pytest.mark.skipif(bool(Cgroups().problem), reason="no control groups here")
def test_what_outlives_its_sandbox_is_killed_and_not_waited_for() -> None:
    stray = subprocess.Popen(["sleep", "86400"])

    async def main() -> None:
        pool = SandboxPool("bubblewrap")
        async with pool.sandbox() as box:
            for folder, names, _ in os.walk(ROOT):
                if box.name in names:
                    Path(folder, box.name, "cgroup.procs").write_text(str(stray.pid))
        await pool.close()

    try:
        asyncio.run(asyncio.wait_for(main(), 200))
        assert stray.wait(30) == -signal.SIGKILL
    finally:
        stray.kill()


@needs_bubblewrap
def test_the_sweep_leaves_the_living_alone() -> None:
    async def main() -> None:
        pool = SandboxPool("bubblewrap")
        async with pool.sandbox() as box:
            sweep()
            assert (await box.run(["echo", "alive"])).stdout == "alive\n"
        await pool.close()

    asyncio.run(main())
    assert leftovers(os.getpid()) == []
