"""Estimate the GPU memory that a run's processes need, from the model's config and the settings alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.config.inference import InferenceSettings
from headway.config.rl import RlSettings
from headway.config.shared import ModelSettings
from headway.config.trainer import AdamW, Muon, Optimizer, Sgd
from headway.models.config import ModelConfig
from headway.models.costs import (
    activation_numbers,
    adapter_count,
    kv_bytes_per_token,
    parameter_count,
    serving_numbers,
)

GIB = 2**30

FLOAT32 = 4
_OWN_BYTES = 3 * GIB // 2
"""Bytes of a process without tensors, and those that its allocator cannot use: context, workspaces, fragments."""
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


def compute_bytes(model: ModelSettings) -> int:
    """Bytes of a number in the precision of computation, on a GPU."""
    return FLOAT32 if model.dtype == "float32" else 2


def trainer_shares(settings: RlSettings, config: ModelConfig) -> Shares:
    """Estimate one rank of the trainer, at its peak."""
    trainer, lora = settings.trainer, settings.model.lora
    number = compute_bytes(settings.model)
    ranks = settings.shard_ranks
    weights = parameter_count(config)
    trained = weights if lora is None else adapter_count(config, lora)
    state = 0 if trainer.optimizer_on_cpu else _state_numbers(trainer.optim) * trained
    masters = FLOAT32 * trained + (0 if lora is None else number * weights)
    return Shares(
        {
            "weights": masters // ranks,
            "gradients": FLOAT32 * trained // ranks,
            "optimizer": FLOAT32 * state // ranks,
            # Gathered, or cast, for computation; all at once at worst.
            "working copy": number * trained if number < FLOAT32 else 0,
            "activations": _activations(settings, config, number),
            "head": _head(settings, config, number),
            "updates": _staging(settings, config, number),
            "process": _OWN_BYTES,
        }
    )


def engine_shares(settings: RlSettings, config: ModelConfig) -> Shares:
    """Estimate one engine, without its KV cache."""
    number, inference = compute_bytes(settings.model), settings.inference
    weights = number * parameter_count(config)
    rows, logits = inference.max_running, FLOAT32 * config.vocab_size
    tokens = max(inference.max_batched_tokens, rows, _PREFILL_TOKENS)
    return Shares(
        {
            "weights": weights,
            # An update is received beside what serves; an adapter is small.
            "spare": weights if settings.model.lora is None else 0,
            "steps": 3 * rows * logits + 2 * number * tokens * serving_numbers(config),
            "process": _OWN_BYTES,
        }
    )


def kv_limits(inference: InferenceSettings, config: ModelConfig, seq_len: int, number: int) -> tuple[int, int]:
    """Bytes of the smallest KV cache that can serve (one sequence), and of the largest that can ever be full."""
    blocks = -(-min(seq_len, config.max_len) // inference.block_size)
    one = blocks * inference.block_size * kv_bytes_per_token(config, number)
    return one, inference.max_running * one


def _state_numbers(optimizer: Optimizer) -> int:
    """Numbers that the optimizer keeps per weight."""
    match optimizer:
        case AdamW() | Muon():  # Muon keeps two for embeddings and head, one for the rest
            return 2
        case Sgd(momentum=momentum):
            return int(momentum > 0)
    return 0


def _activations(settings: RlSettings, config: ModelConfig, number: int) -> int:
    """Estimate what blocks keep of a micro-batch for the backward pass, and what one of them holds while it runs."""
    activations = settings.trainer.activations
    layers = 0 if activations.offload else config.layers
    kept = layers * activation_numbers(config, activations.checkpoint)
    return settings.seq_len * number * (kept + 2 * activation_numbers(config, "off"))


def _head(settings: RlSettings, config: ModelConfig, number: int) -> int:
    """Logits of a chunk and their gradient; the weight's gradient adds up in float32."""
    chunk = min(settings.trainer.head_chunk, settings.seq_len)
    weight = 0 if settings.model.lora else (FLOAT32 + number) * config.vocab_size * config.width
    return chunk * config.vocab_size * (number + FLOAT32) + weight


def _staging(settings: RlSettings, config: ModelConfig, number: int) -> int:
    """Buffers that publish a version: two of all weights where they are mapped, else one tensor at a time."""
    if settings.model.lora is not None:
        return 2 * number * adapter_count(config, settings.model.lora)
    if settings.weights.type == "shared_memory":
        return 2 * number * parameter_count(config)
    return number * config.vocab_size * config.width
