"""Sandboxes per second, the cost of a command in one, and what many of them leave behind. Prints JSON.

    python benchmarks/sandboxes.py                      # 500 starts at 1 and at 50 at once, 300 commands
    python benchmarks/sandboxes.py --episodes 10000     # and that many episodes, with leftovers counted

CPU is that of this process and of its launcher; a command's own is not in it.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from headway.sandboxes.local.bubblewrap import Bubblewrap
from headway.sandboxes.local.cgroups import ROOT
from headway.sandboxes.local.sweep import state_root
from headway.sandboxes.sandbox import Limits

TICKS = os.sysconf("SC_CLK_TCK")


def launcher_seconds(backend: Bubblewrap) -> float:
    """CPU seconds of the launcher itself, without the sandboxes that it started."""
    assert backend._launcher is not None
    fields = Path(f"/proc/{backend._launcher.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def leftovers() -> dict[str, int]:
    """Count what belongs to this process outside it: groups, mounts, processes. Its folder goes at the end."""
    mark = f"headway-{os.getpid()}-"
    groups = sum(name.startswith(mark) for _, names, _ in os.walk(ROOT) for name in names)
    mounts = sum(mark in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
    processes = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            processes += mark.encode() in path.read_bytes()
        except OSError:
            continue
    return {"groups": groups, "mounts": mounts, "processes": processes}


async def episode(backend: Bubblewrap) -> None:
    async with await backend.create(limits=Limits()) as box:
        done = await box.run(["sh", "-c", "echo $((6 * 7)) > x; cat x"])
        assert done.stdout == "42\n", done


async def many(count: int, at_once: int, work: Callable[[], Awaitable[None]]) -> float:
    """Seconds for `count` runs of `work`, `at_once` of them at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with gate:
            await work()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return time.perf_counter() - began


async def starts(backend: Bubblewrap, count: int, at_once: int) -> dict[str, Any]:
    cpu = time.process_time() + launcher_seconds(backend)
    seconds = await many(count, at_once, lambda: episode(backend))
    cpu = time.process_time() + launcher_seconds(backend) - cpu
    return {"at_once": at_once, "per_second": round(count / seconds, 1), "cpu_ms_each": round(1000 * cpu / count, 2)}


async def commands(backend: Bubblewrap, count: int) -> dict[str, Any]:
    async with await backend.create() as box:
        cpu = time.process_time()
        began = time.perf_counter()
        for _ in range(count):
            await box.run(["true"])
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {"wall_ms_each": round(1000 * seconds / count, 2), "cpu_ms_each": round(1000 * cpu / count, 2)}


async def main(options: argparse.Namespace) -> dict[str, Any]:
    backend = Bubblewrap()
    await episode(backend)
    result: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    try:
        result["starts"] = [await starts(backend, options.starts, at_once) for at_once in (1, 50)]
        result["command"] = await commands(backend, options.commands)
        if options.episodes:
            seconds = await many(options.episodes, 50, lambda: episode(backend))
            result["episodes"] = {"count": options.episodes, "seconds": round(seconds, 1), "left": leftovers()}
    finally:
        await backend.close()
    mark = f"headway-{os.getpid()}-"
    result["left_at_the_end"] = {
        **leftovers(),
        "folders": sum(path.name.startswith(mark) for path in state_root().iterdir()),
    }
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=500)
    parser.add_argument("--commands", type=int, default=300)
    parser.add_argument("--episodes", type=int, default=0)
    print(json.dumps(asyncio.run(main(parser.parse_args())), indent=2))
