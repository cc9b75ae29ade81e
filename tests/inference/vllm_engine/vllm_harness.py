"""vLLM's real engine for tests that look behind the protocol, and what Hugging Face makes of the same weights."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from engine_common import QWEN3, publish
from vllm_here import DTYPE, KV_GB, ON_GPU, vllm_arguments

from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import LoraSettings, ModelSettings
from headway.core.protocol import GenerateRequest, SamplingParams, WeightUpdate
from headway.inference.outputs import Choice
from headway.inference.vllm.engine import VllmEngine
from headway.inference.vllm.load import load_vllm
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM

Answer = TypeVar("Answer")

TIED = replace(QWEN3, head_dim=32, max_len=512)
UNTIED = replace(TIED, family="llama", tied=False)
MOE = replace(TIED, family="qwen3_moe", experts=4, experts_per_token=2, expert_width=32, normalize_gates=True)
LORA = LoraSettings(rank=4, alpha=8.0)


def make(config: ModelConfig, seed: int) -> DecoderLM:
    """Random weights, large enough that every token depends visibly on every other."""
    model = build_model(config, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


class Harness:
    """An engine of `config`'s shape in an event loop of its own. `deaths` are those it told of. With adapters it
    computes in bfloat16 on a GPU, where vLLM has them in no other precision."""

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        lora: LoraSettings | None = None,
        build: Callable[[ModelConfig, int], DecoderLM] = make,
        **vllm: Any,
    ) -> None:
        self.config = config
        self.folder = folder
        self.deaths: list[str] = []
        save_checkpoint(build(config, 0), folder)
        settings = ServeSettings(
            model=ModelSettings(path=str(folder), dtype="bfloat16" if ON_GPU and lora else DTYPE, lora=lora),
            inference=InferenceSettings(
                engine="vllm",
                threads=1,
                max_running=64,
                kv_memory_gb=KV_GB if ON_GPU else None,
                vllm=vllm_arguments(**vllm),
            ),
            seq_len=512,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine: VllmEngine = load_vllm(settings, folder, self.deaths.append)
        self.run(self.engine.start())

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def close(self) -> None:
        self.run(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def publish(self, folder: Path, version: int, *, mode: str = "keep", seed: int | None = None) -> WeightUpdate:
        """What the trainer would say of a new version, whose weights are those of `seed` (or of the version)."""
        return publish(folder, version, make(self.config, version if seed is None else seed), mode)

    def served(self, tokens: list[int], model: str = "policy") -> torch.Tensor:
        """The logprobs that the engine gives to all tokens but the first."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        result = self.run(self.engine.generate(GenerateRequest(tokens, model=model, sampling_params=params)))
        assert result.prompt_logprobs is not None
        return torch.tensor([score[0][1] for score in result.prompt_logprobs[1:] if score])

    async def generate(self, tokens: list[int], max_tokens: int, model: str = "policy", **params: Any) -> Choice:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
        result = await self.engine.generate(GenerateRequest(tokens, model=model, sampling_params=sampling))
        return result.choices[0]

    async def until_generated(self, more: int) -> None:
        wanted = self.engine.state().generated_tokens + more
        while self.engine.state().generated_tokens < wanted:  # noqa: ASYNC110 (another process generates)
            await asyncio.sleep(0.005)


def hugging_face(config: ModelConfig, seed: int, folder: Path, tokens: list[int]) -> torch.Tensor:
    """The logprobs that transformers gives to all tokens but the first, with the weights of `seed`."""
    from transformers import AutoModelForCausalLM

    save_checkpoint(make(config, seed), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)
    return logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def wrong(update: WeightUpdate, **fields: Any) -> WeightUpdate:
    return msgspec.structs.replace(update, **fields)
