"""Small models, an engine driven step by step, and the training forward pass to compare with."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from headway.config.shared import FilesystemWeights, LoraSettings
from headway.core.growing import Growing
from headway.core.protocol import GenerateRequest, SamplingParams, WeightUpdate
from headway.core.runs import RunPaths
from headway.envs.tree import Prompt
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.inference.embedded.service import EmbeddedService
from headway.inference.outputs import Choice, Result
from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.checkpoints.tensors import hf_tensors
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.packed import ModelOutput, PackedTokens
from headway.rendering.base import Rendered
from headway.transport.weights import make_sender
from headway.transport.weights.fingerprint import fingerprint_of

QWEN3 = ModelConfig(
    family="qwen3",
    vocab_size=97,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=48,
    tied=True,
    max_len=256,
)
LLAMA = replace(QWEN3, family="llama", heads=6, kv_heads=2, tied=False)
MOE = replace(QWEN3, family="qwen3_moe", experts=4, experts_per_token=2, expert_width=24, normalize_gates=True)
FAMILIES = {"qwen3": QWEN3, "llama": LLAMA, "qwen3_moe": MOE}


def make_model(config: ModelConfig = QWEN3, seed: int = 1) -> DecoderLM:
    """Random weights, large enough that every token depends visibly on every other."""
    model = build_model(config, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


def make_engine(model: DecoderLM, *, depth: int | None = None, **limits: Any) -> EmbeddedEngine:
    defaults = {"max_running": 16, "max_batched_tokens": 256, "max_model_len": 128, "num_blocks": 200, "block_size": 4}
    return EmbeddedEngine(model, EngineLimits(**{**defaults, **limits}), depth=depth)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(0, 97, (length,), generator=generator).tolist()


def as_prompt(token_ids: list[int]) -> Prompt:
    """A prompt as a policy's tree makes it, of tokens without messages."""
    return Prompt(Growing(), (), -1, Rendered([]), 0, Growing(token_ids), False)


def request(tokens: list[int], max_tokens: int = 12, **fields: Any) -> GenerateRequest:
    own = {name: fields.pop(name) for name in ("cache_salt", "priority", "model", "stream") if name in fields}
    return GenerateRequest(tokens, sampling_params=SamplingParams(max_tokens=max_tokens, **fields), **own)


def run_all(engine: EmbeddedEngine, requests: list[GenerateRequest], max_steps: int = 10_000) -> list[Result]:
    """Results in the order of the requests."""
    results: dict[str, Result] = {}
    names = [f"{len(engine.active)}-{engine.sampled.tokens}-{i}" for i in range(len(requests))]
    for name, item in zip(names, requests, strict=True):
        engine.add(item, name)
    for _ in range(max_steps):
        for job, event in engine.step():
            if isinstance(event, Result):
                results[job.request_id] = event
        if engine.idle:
            return [results[name] for name in names]
    raise AssertionError("the engine did not finish")


def run_one(engine: EmbeddedEngine, tokens: list[int], max_tokens: int = 12, **fields: Any) -> Choice:
    return run_all(engine, [request(tokens, max_tokens, **fields)])[0].choices[0]


def forward(model: DecoderLM, tokens: list[int]) -> ModelOutput:
    with torch.no_grad():
        device = model.head_weight().device
        ids, positions = torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device)
        return model(PackedTokens(ids, positions, PackedPlan([len(tokens)], device)))


def training_logprobs(model: DecoderLM, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """The trainer's logprob of each token but the first."""
    with torch.no_grad():
        logprobs = torch.log_softmax(model.logits(forward(model, tokens).hidden_TD) / temperature, dim=-1)
    logprobs = logprobs.cpu()
    return logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def mismatch(model: DecoderLM, prompt_ids: list[int], choice: Choice, temperature: float = 1.0) -> float:
    """The largest difference between the engine's logprobs and the trainer's."""
    expected = training_logprobs(model, prompt_ids + choice.token_ids, temperature)[len(prompt_ids) - 1 :]
    return float((expected - torch.tensor(choice.logprobs)).abs().max())


def make_service(
    model: DecoderLM,
    *,
    max_waiting: int = 4096,
    lora: LoraSettings | None = None,
    on_death: Callable[[str], None] | None = None,
    **limits: Any,
) -> EmbeddedService:
    fingerprint = fingerprint_of(hf_tensors(model)).hexdigest()
    engine = make_engine(model, **limits)
    return EmbeddedService(engine, fingerprint=fingerprint, max_waiting=max_waiting, lora=lora, on_death=on_death)


def publish(folder: Path, version: int, model: DecoderLM, mode: str = "keep") -> WeightUpdate:
    """Publish a model's weights as the trainer would; what an engine is to be told."""
    sender = make_sender(FilesystemWeights(keep_last=100), RunPaths(folder))
    update = sender.publish(version, hf_tensors(model))
    return msgspec.structs.replace(update, mode=mode)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (what is waited for happens in another thread)
        await asyncio.sleep(0.002)


def with_service(service: EmbeddedService, body: Callable[[EmbeddedService], Awaitable[None]]) -> None:
    async def run() -> None:
        await service.start()
        try:
            await body(service)
        finally:
            await service.close()

    asyncio.run(asyncio.wait_for(run(), 120))
