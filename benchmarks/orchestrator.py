"""How much the orchestrator carries: thousands of episodes in flight against a scripted engine, and packing.

    python benchmarks/orchestrator.py --in-flight 5000 --seconds 60
    python benchmarks/orchestrator.py --packing

The engine answers every request after a random time with random tokens, in a process of its own; environment workers,
fleet, dispatcher, scoring, packing and spooling are the real ones. The trainer takes every batch at once.
"""

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from aiohttp import web

from headway.algorithms.registry import make_algorithm
from headway.config.algorithms import Grpo
from headway.config.orchestrator import (
    ConcurrencySettings,
    EnvSettings,
    FilterSettings,
    OrchestratorSettings,
    WorkerSettings,
)
from headway.config.orchestrator import Shuffled as ShuffledSettings
from headway.config.shared import FilesystemRollouts, TrackingSettings
from headway.core.packing import Cost, plan_packing
from headway.core.protocol import SamplingParams, WeightUpdate
from headway.core.runs import RunPaths
from headway.orchestrator.environments import WorkerPools
from headway.orchestrator.fleet.fleet import Fleet
from headway.orchestrator.groups.curriculum import make_curriculum
from headway.orchestrator.groups.sources import Source
from headway.orchestrator.loop import Orchestrator, first_to_end
from headway.orchestrator.outbox import BatchOutbox
from headway.orchestrator.run import RunRecorder, freeze_gc, open_session, resolve_folder
from headway.orchestrator.wiring import make_orchestrator
from headway.transport.inference import InferenceClient
from headway.transport.rollouts import make_sender

TRAINER_APPETITE = 24_000
"""Tokens/s that one GPU trains of a 0.6B model at 16k tokens a sequence, which is what rollouts must keep up with."""


def serve_script(port_file: Path, seconds: float, tokens: int) -> None:
    """The scripted engine."""
    state: dict[str, Any] = {"version": 0, "fingerprint": "v0", "running": 0}
    content = [{"token": f"token_id:{97 + i % 26}", "token_id": 97 + i % 26, "logprob": -1.0} for i in range(tokens)]

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        state["running"] += 1
        try:
            await asyncio.sleep(seconds * random.uniform(0.5, 1.5))
        finally:
            state["running"] -= 1
        count = random.randint(tokens // 2, tokens)
        choice = {
            "index": 0,
            "token_ids": [entry["token_id"] for entry in content[:count]],
            "finish_reason": "stop",
            "logprobs": {"content": content[:count]},
            "versions": [[state["version"], count]],
        }
        prompt = len(body["token_ids"])
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        return web.json_response({"request_id": "r", "choices": [choice], "usage": usage})

    async def report(request: web.Request) -> web.Response:
        numbers = {"waiting": 0, "kv_usage": 0.3, "kv_capacity_tokens": 10**7, "preemptions": 0}
        return web.json_response({**state, **numbers, "tokens_per_second": 0.0, "max_model_len": 4096})

    async def update(request: web.Request) -> web.Response:
        body = await request.json()
        state.update(version=body["version"], fingerprint=body["fingerprint"])
        return web.json_response({**body, "seconds": 0.0, "bytes": 0})

    async def main() -> None:
        app = web.Application()
        app.add_routes([web.post("/inference/v1/generate", generate), web.get("/state", report)])
        app.add_routes([web.post("/weights", update), web.get("/health", report)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port_file.write_text(str(runner.addresses[0][1]))
        await asyncio.Event().wait()

    asyncio.run(main())


class Meter:
    """Loop lag, memory, and what went through."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self.busy: list[float] = []
        self.peak_rss = 0
        self.first_return = 0.0
        self.in_flight: list[int] = []

    async def watch(self, orchestrator: Orchestrator) -> None:
        process = psutil.Process()
        while True:
            before, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.005)
            self.lags.append(time.perf_counter() - before - 0.005)
            self.busy.append(time.thread_time() - cpu)
            self.in_flight.append(orchestrator.dispatcher.in_flight)
            if orchestrator.dispatcher.finished and not self.first_return:
                self.first_return = time.perf_counter()
            if len(self.lags) % 100 == 1:
                self.peak_rss = max(self.peak_rss, process.memory_info().rss)


async def measure(options: argparse.Namespace, url: str, folder: Path) -> dict[str, float]:
    meter, model, paths = Meter(), resolve_folder("tiny"), RunPaths(folder)
    workers = WorkerSettings(
        min=options.workers, max=options.workers, episodes=math.ceil(options.in_flight / options.workers)
    )
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        pool = await WorkerPools(stack, model, "auto").start(EnvSettings(id="reverse-text", workers=workers))
        fleet = Fleet(lambda: {"script": url}, lambda url: InferenceClient(url, session=session))
        source = Source(
            name="reverse-text",
            pool=pool,
            tasks=pool.tasks,
            curriculum=make_curriculum(ShuffledSettings(), pool.tasks, 0),
            algorithm=make_algorithm(Grpo()),
            group_size=8,
            sampling=SamplingParams(max_tokens=options.tokens),
            timeout=600.0,
        )
        sender = make_sender(FilesystemRollouts(), paths)
        outbox = BatchOutbox(sender, paths, seq_len=4096, ranks=8, cost=Cost(), record=True)

        def announced() -> WeightUpdate:
            step = outbox.last_step()
            return WeightUpdate(step, f"v{step}", {"type": "none"})

        recorder = RunRecorder(paths, 0, TrackingSettings())
        settings = OrchestratorSettings(
            batch_size=512,
            group_size=8,
            max_lag=64,
            run_ahead=8,
            concurrency=ConcurrencySettings(min=options.in_flight, max=options.in_flight, initial=options.in_flight),
            filters=FilterSettings(zero_advantage=False),
        )
        orchestrator = make_orchestrator(
            settings,
            max_steps=10**6,
            seq_len=4096,
            sources=[source],
            evals=[],
            fleet=fleet,
            outbox=outbox,
            recorder=recorder,
            on_evaluation=recorder.log_evaluation,
            announced=announced,
        )
        freeze_gc()
        cpu = psutil.Process().cpu_times()
        began = time.perf_counter()
        await first_to_end(orchestrator.run(), meter.watch(orchestrator), asyncio.sleep(options.seconds))
        seconds = time.perf_counter() - began
        used = psutil.Process().cpu_times()
        lines = [json.loads(line) for line in (paths.metrics / "orchestrator.jsonl").read_text().splitlines()]
    tokens = sum(line["sampled_tokens"] for line in lines) + orchestrator.tally.sampled_tokens
    # Nothing comes back while the first episodes are under way.
    steady = seconds - (meter.first_return - began)
    return {
        "episodes_in_flight": float(max(meter.in_flight)),
        "episodes_per_second": orchestrator.dispatcher.finished / steady,
        "batches": float(len(lines)),
        "loop_lag_p50_ms": 1000 * float(np.quantile(meter.lags, 0.5)),
        "loop_lag_p99_ms": 1000 * float(np.quantile(meter.lags, 0.99)),
        "loop_lag_max_ms": 1000 * max(meter.lags),
        # What the loop's own work takes between two turns; the lag above also counts waiting for a core.
        "loop_busy_p99_ms": 1000 * float(np.quantile(meter.busy, 0.99)),
        "loop_busy_max_ms": 1000 * max(meter.busy),
        "peak_memory_mb": meter.peak_rss / 2**20,
        "cpu_ms_per_episode": 1000 * (used.user + used.system - cpu.user - cpu.system)
        / max(1, orchestrator.dispatcher.finished),
        "tokens_per_second": tokens / steady,
        "trainers_fed": tokens / steady / TRAINER_APPETITE,
    }  # fmt: skip


def packing() -> dict[str, float]:
    """A million tokens of log-normal lengths."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(math.log(512) - 0.5, 1.0, 4000), 1, 8192).astype(int)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), 1_000_000)) + 1]
    began = time.perf_counter()
    plan = plan_packing(lengths.tolist(), 8192, 8, Cost())
    seconds = time.perf_counter() - began
    work = [float(Cost().of(lengths[[i for bin_ in rank for i in bin_]]).sum()) for rank in plan]
    return {
        "tokens": float(lengths.sum()),
        "samples": float(len(lengths)),
        "seconds": seconds,
        "fill": float(lengths.sum() / (8192 * sum(len(rank) for rank in plan))),
        "imbalance": max(work) / (sum(work) / len(work)) - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure")
    parser.add_argument("--engine-seconds", type=float, default=20.0, help="mean time of one reply")
    parser.add_argument("--tokens", type=int, default=128, help="longest reply")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--packing", action="store_true", help="measure packing instead")
    parser.add_argument("--script", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.script:
        serve_script(options.script, options.engine_seconds, options.tokens)
        return
    if options.packing:
        results = packing()
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            engine = subprocess.Popen([sys.executable, *sys.argv, "--script", str(folder / "port")])
            try:
                while not (folder / "port").exists() or not (folder / "port").read_text():
                    time.sleep(0.1)
                url = f"http://127.0.0.1:{(folder / 'port').read_text()}"
                results = asyncio.run(measure(options, url, folder / "run"))
            finally:
                engine.terminate()
                engine.wait()
    print(json.dumps({"cores": os.cpu_count(), **{name: round(value, 4) for name, value in results.items()}}, indent=2))


if __name__ == "__main__":
    main()
