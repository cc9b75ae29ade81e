"""What it costs to run episodes, the engine excluded: `python benchmarks/environments.py [--episodes N]`.

CPU milliseconds per episode, summed over the orchestrating process and its workers, on one core, against an engine
that answers at once from another. Beside it, in the same run, the in-process path of verifiers where it is installed.

Bars: 2 ms for a single turn, 4 ms for two turns with a tool. Exits with 1 when one does not hold.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from headway.config.orchestrator import EnvSettings, WorkerSettings
from headway.core.episodes import EpisodeRequest
from headway.envs.workers.pool import EnvPool
from headway.models.tiny_tokenizer import save_tiny_tokenizer

PARTS = Path(__file__).parent / "environment_parts"
CASES = {"single turn": ("Reverse", "bench-reverse", 2.0), "two turns, a tool": ("Calculator", "bench-calculator", 4.0)}
IN_FLIGHT = 32


def cpu_seconds() -> float:
    """CPU time of this process and of those it has started."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def measured(episode: Callable[[int], Coroutine[Any, Any, float]], count: int) -> tuple[float, float]:
    """CPU milliseconds per episode and the mean reward, after a warm-up."""
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one(index: int) -> float:
        async with gate:
            return await episode(index)

    await asyncio.gather(*(one(i) for i in range(min(count, IN_FLIGHT))))
    before = cpu_seconds()
    rewards = await asyncio.gather(*(one(i) for i in range(count)))
    return 1000 * (cpu_seconds() - before) / count, sum(rewards) / count


async def ours(name: str, folder: Path, url: str, count: int) -> tuple[float, float]:
    workers = WorkerSettings(min=1, max=1, episodes=IN_FLIGHT)
    pool = EnvPool(EnvSettings(id=f"{PARTS / 'ours.py'}:{name}", workers=workers), model=folder)
    await pool.start()

    async def episode(index: int) -> float:
        task = pool.tasks[index % len(pool.tasks)]
        outcome = await pool.run(EpisodeRequest(f"e{index}", f"g{index}", task, [url]))
        assert outcome.error is None, outcome.error
        return outcome.reward

    try:
        return await measured(episode, count)
    finally:
        await pool.close()


async def theirs(taskset: str, folder: Path, url: str, count: int) -> tuple[float, float]:
    import verifiers.v1 as vf
    from renderers import Qwen3RendererConfig

    agent = {"harness": {"id": "bench-harness"}, "runtime": {"type": "subprocess"}}
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": taskset}, "agent": agent}))
    tasks = list(env.taskset)
    client = vf.TrainClientConfig(base_url=f"{url}/v1", renderer=Qwen3RendererConfig(), renderer_model_name=str(folder))
    async with env.serving():
        context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig(max_tokens=64))

        async def episode(index: int) -> float:
            outcome = await env.run_slot(env.slots(tasks[index % len(tasks)])[0], context)
            assert outcome.ok, outcome.errors
            return float(outcome.traces[0].reward)

        return await measured(episode, count)


def pinned(core: int) -> None:
    """Stay on one core, and everything started from here on as well."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})


def side(which: str, case: str, folder: Path, url: str, count: int) -> None:
    """One measurement, in a process of its own; prints milliseconds and reward."""
    pinned(0)
    sys.path.insert(0, str(PARTS))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PARTS), os.environ.get("PYTHONPATH", "")])
    name, taskset, _ = CASES[case]
    work = ours(name, folder, url, count) if which == "headway" else theirs(taskset, folder, url, count)
    print(*asyncio.run(work))


def compare(count: int) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_tokenizer(folder)
        engine = subprocess.Popen([sys.executable, PARTS / "engine.py", name], stdout=subprocess.PIPE, text=True)
        try:
            assert engine.stdout is not None
            url = f"http://127.0.0.1:{engine.stdout.readline().strip()}"
            return report(folder, url, count)
        finally:
            engine.kill()
            engine.wait()


def report(folder: Path, url: str, count: int) -> int:
    held = True
    print(f"{'episode':<20} {'headway':>12} {'verifiers':>12} {'ratio':>8} {'bar':>8}")
    for case, (_, _, bar) in CASES.items():
        ms, reward = measure("headway", case, folder, url, count)
        assert reward == 1.0, f"episodes went wrong: mean reward {reward}"
        other = measure("verifiers", case, folder, url, max(32, count // 20)) if find_spec("verifiers") else None
        shown = f"{other[0]:>9.1f} ms" if other else "not installed"
        ratio = f"{other[0] / ms:>7.0f}x" if other else ""
        print(f"{case:<20} {ms:>9.2f} ms {shown:>12} {ratio:>8} {bar:>5.1f} ms")
        held &= ms <= bar
    return 0 if held else 1


def measure(which: str, case: str, folder: Path, url: str, count: int) -> tuple[float, float]:
    command = [sys.executable, __file__, "--side", which, case, str(folder), url, "--episodes", str(count)]
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode != 0:
        raise SystemExit(f"{which}, {case}: {out.stderr[-2000:]}")
    ms, reward = out.stdout.split()[-2:]
    return float(ms), float(reward)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000, help="episodes per measurement (2000; verifiers fewer)")
    parser.add_argument("--side", nargs=4, metavar=("WHICH", "CASE", "FOLDER", "URL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        which, case, folder, url = arguments.side
        side(which, case, Path(folder), url, arguments.episodes)
        return 0
    return compare(arguments.episodes)


if __name__ == "__main__":
    sys.exit(main())
