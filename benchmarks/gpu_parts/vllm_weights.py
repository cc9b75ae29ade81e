"""Weight updates into vLLM on one GPU: from the trainer's GPU memory into the workers, and through the host beside it.

PYTHONPATH=benchmarks python -m gpu_parts.vllm_weights qwen3-4b
"""

import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gpu_parts.weights import OUTPUT, PROMPT, SEQUENCES, SHAPES, trainer
from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import ModelSettings
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.serve import settle
from headway.inference.vllm.engine import VllmEngine
from headway.inference.vllm.load import load_vllm
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint

ROUNDS = {"device": 17, "host": 3}
QUIET_SECONDS = 1.0
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [SEQUENCES]}
"""Decoding replays a CUDA graph, as it does by default; nothing is compiled, which would take a minute."""


def measure(shape: str) -> dict[str, Any]:
    """For each way: `seconds` from the trainer's weights to an engine that serves them, `paused_seconds` without
    tokens beyond a step's; medians, the first update of each way left out."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        save_checkpoint(build_model(SHAPES[shape], device="cuda", dtype=torch.bfloat16, seed=2), Path(folder))
        torch.cuda.empty_cache()
        with trainer(shape) as publish:
            publish(1, True)
            return asyncio.run(_measure(folder, publish))


async def _measure(folder: str, publish: Any) -> dict[str, Any]:
    settings = ServeSettings(
        model=ModelSettings(path=folder, dtype="bfloat16"),
        inference=InferenceSettings(
            engine="vllm",
            max_running=SEQUENCES,
            kv_memory_gb=20.0,
            vllm={"attention_config": {"backend": "FLASH_ATTN"}, "compilation_config": GRAPHS},
        ),
        seq_len=PROMPT + OUTPUT,
    )
    engine = await asyncio.to_thread(load_vllm, settings, Path(folder))
    await engine.start()
    settle()
    arrivals, collections = Arrivals([], []), GarbageCollections()
    flights = [asyncio.create_task(_keep_busy(engine, number, arrivals)) for number in range(SEQUENCES)]
    found: dict[str, Any] = {}
    version, fetches = 1, engine._loaded._kept_by_workers
    for way in ["device", "host"] if fetches else ["host"]:
        engine._loaded._kept_by_workers = way == "device"
        rows = []
        for _ in range(ROUNDS[way]):
            version += 1
            collections.longest = 0.0
            rows.append(await _update(engine, publish, version, arrivals))
            rows[-1]["longest_garbage_collection"] = collections.longest
            print(way, version, {name: round(value, 4) for name, value in rows[-1].items()}, flush=True)
        found[way] = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
        found[f"{way}_each"] = {name: [row[name] for row in rows[1:]] for name in ("seconds", "paused_seconds")}
    for flight in flights:
        flight.cancel()
    await engine.close()
    return {**found, "room_for_a_copy": fetches}


@dataclass
class Arrivals:
    """Moments at which tokens came, and at which replies began."""

    tokens: list[float]
    begun: list[float]


class GarbageCollections:
    """The longest collection of this process, in seconds: tokens wait for it, too, and it is none of an update's."""

    def __init__(self) -> None:
        self.longest = self._began = 0.0
        gc.callbacks.append(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.longest = max(self.longest, time.perf_counter() - self._began)


async def _update(engine: VllmEngine, publish: Any, version: int, arrivals: Arrivals) -> dict[str, float]:
    began = len(arrivals.tokens)
    await asyncio.sleep(QUIET_SECONDS)
    quiet = _gaps(arrivals.tokens[began:])
    step = statistics.median(quiet)
    update, stages = await asyncio.to_thread(publish, version, True)
    since, begun, started = len(arrivals.tokens), len(arrivals.begun), time.perf_counter()
    reply = await engine.update(update)
    ended = time.perf_counter()
    await asyncio.sleep(0.3)
    assert reply.version == version
    return {
        "seconds": stages["publish"] + ended - started,
        "publish_seconds": stages["publish"],
        "receive_seconds": ended - started,
        "paused_seconds": max(0.0, max(_gaps(arrivals.tokens[since - 1 :])) - step),
        "longest_wait_without_update": max(quiet) - step,
        "replies_begun_meanwhile": float(len(arrivals.begun) - begun),
        "step_seconds": step,
        "bytes": float(reply.bytes),
    }


def _gaps(arrivals: list[float]) -> list[float]:
    """Seconds between steps: the tokens of one step arrive together."""
    return [gap for a, b in pairwise(arrivals) if (gap := b - a) > 1e-3]


async def _keep_busy(engine: VllmEngine, number: int, arrivals: Arrivals) -> None:
    tokens = [(7 * number + 13 * place) % 97 for place in range(PROMPT)]
    while True:
        arrivals.begun.append(time.perf_counter())
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        async for _ in engine.stream(GenerateRequest(tokens, sampling_params=params, stream_interval=1)):
            arrivals.tokens.append(time.perf_counter())


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1]), indent=2))
