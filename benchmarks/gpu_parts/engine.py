"""The embedded engine on one GPU: tokens per second of the service, a decode step beside its memory floor, and how far
its logprobs are from the CPU's."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from engine_parts.work import SHAPES
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.inference.embedded.service import EmbeddedService
from headway.models.build import build_model
from headway.models.configs.config import ModelConfig
from headway.models.costs import kv_bytes_per_token
from headway.models.decoder import DecoderLM
from headway.models.fp8 import apply_fp8, quantize_weights, quantized_parameters

Generate = Callable[[int, int, int], float]
"""Seconds of so many sequences at once, with so many tokens in and out."""
ROUNDS, LONG = 3, 1024
"""A row with more tokens out than this is measured in one round: it takes minutes."""
BANDWIDTH = 4.3e12
"""Bytes per second that an H200's memory gives in practice."""


def measure(shape: str, sequences: int, prompt: int = 128, output: int = 512) -> dict[str, float]:
    """Random weights of a shape: `sequences` requests at once, this many tokens in and out, through the service."""
    started = time.perf_counter()
    engine = make_engine(SHAPES[shape], sequences, prompt + output)
    with serving(engine) as generate:
        generate(1, prompt, 1)
        start_seconds = time.perf_counter() - started
        row = timed(generate, sequences, prompt, output)
    floor = floor_ms(engine.model, sequences, prompt + output // 2)
    return row | {"floor_ms": floor, "start_seconds": start_seconds}


def timed(generate: Generate, sequences: int, prompt: int, output: int, rounds: int | None = None) -> dict[str, float]:
    """Medians over rounds, after one that warms the engine up. A decode step is what a generation takes beyond one of a
    single token."""
    rounds = rounds or (1 if output > LONG else ROUNDS)
    generate(sequences, prompt, min(output, 64))
    prefill_seconds = median(generate(sequences, prompt, 1) for _ in range(rounds))
    seconds = median(generate(sequences, prompt, output) for _ in range(rounds))
    return {
        "tokens_per_second": sequences * output / seconds,
        "decode_step_ms": 1000 * (seconds - prefill_seconds) / (output - 1),
        "prefill_seconds": prefill_seconds,
    }


@contextmanager
def serving(engine: EmbeddedEngine) -> Iterator[Generate]:
    """Inside, requests go through the engine's service."""
    service = EmbeddedService(engine, fingerprint="")
    with asyncio.Runner() as runner:
        runner.run(service.start())
        yield lambda sequences, prompt, output: runner.run(_sample_all(service, sequences, prompt, output))
        runner.run(service.close())


def check() -> dict[str, float]:
    """The largest difference between logprobs that the GPU's engine sampled with, in both precisions, and those that
    the CPU's engine has for the same tokens under the same weights in float32."""
    found = {}
    config = replace(SHAPES["qwen3-0.6b"], layers=2, vocab_size=4096)
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(config, device="cuda", dtype=dtype)
        on_cpu = build_model(config, seed=None)
        on_cpu.load_state_dict({name: tensor.float().cpu() for name, tensor in model.state_dict().items()})
        tokens = [[(7 * i * i + 3 * j) % 4096 for i in range(40 + 9 * j)] for j in range(4)]
        reference = EmbeddedEngine(on_cpu, _limits(8, 512))
        worst = 0.0
        for prompt, choice in zip(tokens, _generate(EmbeddedEngine(model, _limits(8, 512)), tokens), strict=True):
            expected = torch.tensor(_prompt_logprobs(reference, prompt + choice.token_ids)[len(prompt) - 1 :])
            worst = max(worst, float((torch.tensor(choice.logprobs) - expected).abs().max()))
        found[f"logprob_difference_{str(dtype).removeprefix('torch.')}"] = worst
    return found


def make_engine(
    config: ModelConfig,
    sequences: int,
    length: int,
    depth: int | None = None,
    *,
    fp8: bool = False,
    kv_fp8: bool = False,
) -> EmbeddedEngine:
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = build_model(config, device=device, dtype=dtype).eval()
    if fp8:
        apply_fp8(model)
        quantize_weights(model, dtype)
    return EmbeddedEngine(model, replace(_limits(sequences, length), kv_fp8=kv_fp8), depth=depth)


def floor_ms(model: DecoderLM, sequences: int, context: int, *, kv_fp8: bool = False) -> float:
    """What reading all weights and all keys and values once takes."""
    config, weight = model.config, model.head_weight()
    served = quantized_parameters(model)
    weights = sum(p.numel() * (1 if name in served else p.element_size()) for name, p in model.named_parameters())
    per_token = kv_bytes_per_token(config, weight.dtype.itemsize, fp8=kv_fp8)
    return 1000 * (weights + sequences * context * per_token) / BANDWIDTH


def prompts(sequences: int, length: int, vocab: int = 100_000) -> list[list[int]]:
    return [[(31 * i + 17 * j) % min(vocab, 100_000) for i in range(length)] for j in range(sequences)]


async def _sample_all(service: EmbeddedService, sequences: int, prompt: int, output: int) -> float:
    """Seconds of so many requests at once."""
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    started = time.perf_counter()
    given = prompts(sequences, prompt, service.vocab_size)
    requests = [GenerateRequest(tokens, sampling_params=params) for tokens in given]
    await asyncio.gather(*(service.generate(request) for request in requests))
    return time.perf_counter() - started


def _limits(sequences: int, length: int) -> EngineLimits:
    blocks = sequences * -(-length // 16)
    return EngineLimits(sequences, 8192, length, blocks, 16, prefix_cache=False)


def _generate(engine: EmbeddedEngine, tokens: list[list[int]]) -> list[Any]:
    return _run(engine, [GenerateRequest(p, sampling_params=SamplingParams(max_tokens=48, seed=1)) for p in tokens])


def _prompt_logprobs(engine: EmbeddedEngine, tokens: list[int]) -> list[float]:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (result,) = _run(engine, [GenerateRequest(tokens, sampling_params=params)], whole=True)
    return [scored[0][1] for scored in result.prompt_logprobs[1:]]


def _run(engine: EmbeddedEngine, requests: list[GenerateRequest], *, whole: bool = False) -> list[Any]:
    done: dict[int, Any] = {}
    for number, request in enumerate(requests):
        engine.add(request, str(number))
    while not engine.idle:
        for job, event in engine.step():
            done[int(job.request_id)] = event
    return [done[n] if whole else done[n].choices[0] for n in range(len(requests))]
