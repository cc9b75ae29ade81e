"""Estimate the GPU memory that a run's processes need, from the model's config and the settings alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.config.inference import InferenceSettings
from headway.config.rl import RlSettings
from headway.models.configs.config import ModelConfig
from headway.models.costs import (
    MOST_SNAPSHOTS,
    adapter_count,
    image_numbers,
    kv_bytes_per_token,
    parameter_count,
    serving_numbers,
    state_bytes_per_sequence,
)
from headway.models.vision.config import VisionConfig
from headway.models.vision.costs import MOST_FEATURE_BYTES, MOST_PATCHES
from headway.trainer.memory.estimate import FLOAT32, compute_bytes, step_memory

GIB = 2**30

_TRAINER_BYTES = 3 * GIB // 4
"""Bytes of a trainer beside those that its allocator holds: CUDA's context, workspaces of libraries."""
_ENGINE_BYTES = 3 * GIB // 2
"""The same of an engine, with captured graphs, and what its allocator cannot use."""
_PREFILL_TOKENS = 8192
"""Tokens in one step of an engine on a GPU, unless the settings say otherwise."""


@dataclass(frozen=True)
class Shares:
    """Bytes by what they are for."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def explain(self) -> str:
        return ", ".join(f"{name} {gib(size)}" for name, size in self.parts.items() if size >= 0.05 * GIB)


def gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def trainer_shares(settings: RlSettings, config: ModelConfig) -> Shares:
    """Estimate one rank of the trainer, at its peak."""
    # How many micro-batches a step has depends on the samples: several, for all that is known here.
    parts = step_memory(settings, config, accumulates=True).parts()
    updates = _staging(settings, config, compute_bytes(settings.model.dtype))
    return Shares({**parts, "updates": updates, "process": _TRAINER_BYTES})


def engine_shares(settings: RlSettings, config: ModelConfig) -> Shares:
    """Estimate one engine, without its KV cache."""
    number, inference = compute_bytes(settings.model.dtype), settings.inference
    weights = number * parameter_count(config)
    rows, logits = inference.max_running, FLOAT32 * config.vocab_size
    tokens = max(inference.max_batched_tokens, rows, _PREFILL_TOKENS)
    image = image_numbers(config)
    # The tower takes an image, which has no more tokens than a sequence, or several smaller ones.
    several = min(tokens, MOST_PATCHES // config.tower.merge**2) if isinstance(config, VisionConfig) else 0
    shown = max(min(settings.seq_len, config.max_len), several)
    seen = shown * (FLOAT32 * image.pixels + number * image.working)
    return Shares(
        {
            "weights": weights,
            # An update is received beside what serves; an adapter is small.
            "spare": weights if settings.model.lora is None else 0,
            "steps": 3 * rows * logits + 2 * number * tokens * serving_numbers(config),
            "images": seen + MOST_FEATURE_BYTES if seen else 0,
            "process": _ENGINE_BYTES,
        }
    )


def kv_limits(inference: InferenceSettings, config: ModelConfig, seq_len: int, number: int) -> tuple[int, int]:
    """Bytes of the smallest KV cache that can serve (one sequence), and of the largest that can ever be full, each with
    the recurrent states of all running sequences."""
    blocks = -(-min(seq_len, config.max_len) // inference.block_size)
    one = blocks * inference.block_size * kv_bytes_per_token(config, number, fp8=inference.kv_fp8)
    states = inference.max_running * state_bytes_per_sequence(config)
    return one + states, inference.max_running * one + (1 + MOST_SNAPSHOTS * inference.prefix_cache) * states


def _staging(settings: RlSettings, config: ModelConfig, number: int) -> int:
    """Buffers that publish a version: two of all weights where they are mapped, else one tensor at a time."""
    if settings.model.lora is not None:
        return 2 * number * adapter_count(config, settings.model.lora)
    if settings.weights.type == "shared_memory":
        return 2 * number * parameter_count(config)
    return number * config.vocab_size * config.width
