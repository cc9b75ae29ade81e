"""Weight updates on one GPU: a trainer's process and an engine's that decodes meanwhile, through CUDA memory handles.

PYTHONPATH=benchmarks python -m gpu_parts.weights qwen3-4b
"""

import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from headway.config.shared import SharedMemoryWeights
from headway.core.protocol import GenerateRequest, SamplingParams, WeightUpdate
from headway.core.runs import RunPaths
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.inference.embedded.service import EmbeddedService
from headway.models.build import build_model
from headway.models.checkpoints.tensors import base_parameters, hf_tensors
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.transport.weights import host_memory, make_sender
from headway.transport.weights.fingerprint import fingerprint_of
from weights import no_fingerprints

SHAPES = {
    "qwen3-0.6b": ModelConfig("qwen3", 151_936, 1024, 28, 16, 8, 128, 3072, tied=True, max_len=40_960),
    "qwen3-4b": ModelConfig("qwen3", 151_936, 2560, 36, 32, 8, 128, 9728, tied=True, max_len=40_960),
}
SEQUENCES, PROMPT, OUTPUT = 64, 64, 900
ROUNDS = 64
"""With fingerprints, and as many without: what they cost is less than updates differ from each other."""
QUIET_STEPS = 6


def measure(shape: str) -> dict[str, float]:
    """`seconds` from the trainer's weights to an engine that serves them, `paused_seconds` of the engine, which
    decodes 64 sequences; medians. `fingerprint_share` is what an update without fingerprints takes less."""
    with trainer(shape) as publish:
        return asyncio.run(_measure(shape, publish))


def check() -> list[dict[str, Any]]:
    """What an engine on the GPU serves after an update is, to the bit, what the trainer had."""
    with trainer("qwen3-0.6b") as publish:
        service = _service(SHAPES["qwen3-0.6b"])
        update, _ = publish(1, True)
        staged = service._updater.stage(update)
        service._updater.switch(staged)
        served = fingerprint_of((name, tensor.cpu()) for name, tensor in hf_tensors(service._engine.model)).hexdigest()
        service._updater.close()
    return [{"name": "served weights differ", "error": float(served != update.fingerprint), "tolerance": 0.0}]


async def _measure(shape: str, publish: Any) -> dict[str, float]:
    service = _service(SHAPES[shape])
    engine = service._engine
    steps = _watch_steps(engine)
    await service.start()
    flights = [asyncio.create_task(_keep_busy(service, number)) for number in range(SEQUENCES)]
    rows: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    moved = 0
    for version in range(1, 2 * ROUNDS + 5):
        counted = version % 4 < 2
        quiet = _gaps(await asyncio.to_thread(_more_steps, steps))
        started = time.perf_counter()
        update, stages = await asyncio.to_thread(publish, version, counted)
        published = time.perf_counter()
        with no_fingerprints(not counted):
            reply = await service.update(update)
        ended = time.perf_counter()
        await asyncio.sleep(0.02)
        moved = reply.bytes
        longest = max(_gaps(steps, started), default=0.0)
        row = {
            "seconds": stages["publish"] + ended - published,
            "publish": stages["publish"],
            "receive": ended - published,
            "handed_over": published - started - stages["publish"],
            "paused": max(0.0, longest - statistics.median(quiet)),
            "step": statistics.median(quiet),
        }
        print(version, "counted" if counted else "uncounted", {name: round(value, 5) for name, value in row.items()})
        if version > 4:
            rows[counted].append(row)
    for flight in flights:
        flight.cancel()
    await service.close()
    plain, bare = _middle(rows[True]), _middle(rows[False])
    return {
        "seconds": plain["seconds"],
        "update_seconds": plain["seconds"],
        "paused_seconds": plain["paused"],
        "publish_seconds": plain["publish"],
        "receive_seconds": plain["receive"],
        "step_seconds": plain["step"],
        "bytes": float(moved),
        "fingerprint_share": 1 - bare["seconds"] / plain["seconds"],
        "copy_floor_seconds": _copy_seconds(moved),
    }


def _middle(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


@contextmanager
def trainer(shape: str) -> Iterator[Any]:
    """A process with float32 weights on the GPU; what is given publishes a version of them, in bfloat16."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as root:
        process = context.Process(target=_train, args=(theirs, shape, root), daemon=True)
        process.start()
        theirs.close()

        def publish(version: int, counted: bool) -> tuple[WeightUpdate, dict[str, float]]:
            ours.send((version, counted))
            body, stages = ours.recv()
            return msgspec.json.decode(body, type=WeightUpdate), stages

        try:
            yield publish
        finally:
            process.kill()
            process.join()
            host_memory.remove_stale_segments()


def _train(pipe: Connection, shape: str, root: str) -> None:
    model = build_model(SHAPES[shape], device="cuda", seed=1)
    sender = make_sender(SharedMemoryWeights(), RunPaths(Path(root) / f"update-{shape}"))
    with suppress(EOFError):
        while True:
            version, counted = pipe.recv()
            with torch.no_grad():
                torch._foreach_mul_([parameter.data for _, parameter in base_parameters(model)], 1.01)
            torch.cuda.synchronize()
            started = time.perf_counter()
            with no_fingerprints(not counted):
                update = sender.publish(version, hf_tensors(model), dtype=torch.bfloat16)
            torch.cuda.synchronize()
            pipe.send((msgspec.json.encode(update), {"publish": time.perf_counter() - started}))


def _service(config: ModelConfig) -> EmbeddedService:
    model: DecoderLM = build_model(config, device="cuda", dtype=torch.bfloat16, seed=2).eval()
    blocks = SEQUENCES * -(-(PROMPT + OUTPUT) // 16) + 64
    limits = EngineLimits(
        max_running=SEQUENCES,
        max_batched_tokens=8192,
        max_model_len=PROMPT + OUTPUT,
        num_blocks=blocks,
        block_size=16,
        prefix_cache=False,
    )
    return EmbeddedService(EmbeddedEngine(model, limits), fingerprint="")


async def _keep_busy(service: EmbeddedService, number: int) -> None:
    tokens = [(7 * number + 13 * place) % 97 for place in range(PROMPT)]
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=number)
    while True:
        await service.generate(GenerateRequest(tokens, sampling_params=params))


def _watch_steps(engine: EmbeddedEngine) -> list[float]:
    """When steps ended, from now on."""
    ends: list[float] = []
    step = engine.step

    def watched() -> Any:
        events = step()
        ends.append(time.perf_counter())
        return events

    engine.step = watched  # type: ignore[method-assign]
    return ends


def _more_steps(ends: list[float]) -> list[float]:
    """Wait for steps that nothing disturbs."""
    before = len(ends)
    while len(ends) < before + QUIET_STEPS:
        time.sleep(0.02)
    return ends[before:]


def _gaps(ends: list[float], since: float = 0.0) -> list[float]:
    recent = [end for end in ends[-4000:] if end >= since]
    return [later - earlier for earlier, later in pairwise(recent)]


def _copy_seconds(size: int) -> float:
    """One copy of as many bytes within the GPU's memory."""
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1]), indent=2))
