"""What every contender is given: one model, prompts of one length, and how much to sample."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headway.models.configs.config import ModelConfig

SMALL: dict[str, Any] = {"width": 256, "layers": 4, "heads": 8, "kv_heads": 4, "mlp_width": 768}
"""The shape of "small": 3.2M parameters, with tiny's tokenizer."""


def _qwen3(width: int, layers: int, heads: int, mlp_width: int) -> ModelConfig:
    own: dict[str, Any] = {"kv_heads": 8, "head_dim": 128, "rope_theta": 1e6, "tied": True, "max_len": 40_960}
    return ModelConfig("qwen3", 151_936, width, layers, heads, mlp_width=mlp_width, **own)


SHAPES = {
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728),
    "qwen3-8b": replace(_qwen3(4096, 36, 32, 12_288), tied=False),
    "qwen3-30b-a3b": replace(
        _qwen3(2048, 48, 32, 6144),
        family="qwen3_moe",
        kv_heads=4,
        tied=False,
        experts=128,
        experts_per_token=8,
        expert_width=768,
        normalize_gates=True,
    ),
}
"""Shapes of real models, for random weights."""


@dataclass(frozen=True)
class Work:
    """Sampled at temperature 1 with the logprob of every sampled token; nobody stops early."""

    folder: str
    vocab: int
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    sequences: int
    prompt: int
    output: int
    threads: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.output

    def prompts(self) -> list[list[int]]:
        numbers = random.Random(0)
        return [[numbers.randrange(self.vocab) for _ in range(self.prompt)] for _ in range(self.sequences)]


def model_folder(name: str, temporary: Path, device: str) -> Path:
    """A checkpoint folder: `name` itself, a built-in's, or random weights of a shape, made in `temporary`."""
    import torch

    from headway.models.build import build_model
    from headway.models.checkpoints.folders import save_checkpoint
    from headway.models.registry import load_config
    from headway.models.tiny import resolve_model

    if name != "small" and name not in SHAPES:
        return resolve_model(name)
    tiny = resolve_model("tiny")
    if name == "small":
        model = build_model(replace(load_config(tiny), **SMALL))
    else:
        model = build_model(SHAPES[name], device=device, dtype=torch.bfloat16)
    save_checkpoint(model, temporary / name, files_from=tiny)
    return temporary / name
