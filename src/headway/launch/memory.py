"""How much memory the processes of a run need on a GPU, from the shapes of the model and the settings alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.config.inference import InferenceSettings
from headway.config.rl import RlSettings
from headway.config.shared import LoraSettings, ModelSettings
from headway.config.trainer import AdamW, Muon, Optimizer, Sgd
from headway.models.config import ModelConfig

GIB = 2**30

FLOAT32 = 4
_OWN_BYTES = 3 * GIB // 2
"""What a process takes before its first tensor, and what its allocator cannot use: context, workspaces, fragments."""
_PREFILL_TOKENS = 8192
"""What an engine takes into one step on a GPU where the settings don't say."""


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


def parameter_count(config: ModelConfig) -> int:
    """All weights, a tied head once."""
    return (1 if config.tied else 2) * config.vocab_size * config.width + sum(
        _layer_parameters(config, layer) for layer in range(config.layers)
    )


def adapter_count(config: ModelConfig, lora: LoraSettings) -> int:
    """Weights of an adapter on the plain linear layers."""
    inner, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    sides = {
        "q_proj": config.width + inner,
        "k_proj": config.width + kv,
        "v_proj": config.width + kv,
        "o_proj": inner + config.width,
        "gate_proj": config.width + config.mlp_width,
        "up_proj": config.width + config.mlp_width,
        "down_proj": config.mlp_width + config.width,
    }
    return config.layers * lora.rank * sum(sides.get(target, 0) for target in lora.targets)


def trainer_shares(settings: RlSettings, config: ModelConfig) -> Shares:
    """Of one rank, at its peak."""
    trainer, lora = settings.trainer, settings.model.lora
    number = compute_bytes(settings.model)
    ranks = settings.placement.trainer_ranks // trainer.replicas
    weights = parameter_count(config)
    trained = weights if lora is None else adapter_count(config, lora)
    remembered = 0 if trainer.optimizer_on_cpu else _remembered(trainer.optim) * trained
    masters = FLOAT32 * trained + (0 if lora is None else number * weights)
    return Shares(
        {
            "weights": masters // ranks,
            "gradients": FLOAT32 * trained // ranks,
            "optimizer": FLOAT32 * remembered // ranks,
            # Gathered, or cast, for computation; all at once at worst.
            "working copy": number * trained if number < FLOAT32 else 0,
            "activations": _activations(settings, config, number),
            "head": _head(settings, config, number),
            "updates": _staging(settings, config, number),
            "process": _OWN_BYTES,
        }
    )


def engine_shares(settings: RlSettings, config: ModelConfig) -> Shares:
    """Of one engine, without its KV cache."""
    number, inference = compute_bytes(settings.model), settings.inference
    weights = number * parameter_count(config)
    rows, logits = inference.max_running, FLOAT32 * config.vocab_size
    tokens = max(inference.max_batched_tokens, rows, _PREFILL_TOKENS)
    widest = 2 * config.mlp_width + 4 * config.width + 2 * config.heads * config.head_dim
    return Shares(
        {
            "weights": weights,
            # An update is received beside what serves; an adapter is small.
            "spare": weights if settings.model.lora is None else 0,
            "steps": 3 * rows * logits + 2 * number * tokens * widest,
            "process": _OWN_BYTES,
        }
    )


def kv_bytes_per_token(config: ModelConfig, number: int) -> int:
    return 2 * config.layers * config.kv_heads * config.head_dim * number


def kv_limits(inference: InferenceSettings, config: ModelConfig, seq_len: int, number: int) -> tuple[int, int]:
    """Bytes of the smallest KV cache that can serve, one sequence, and of the largest that can ever be full."""
    blocks = -(-min(seq_len, config.max_len) // inference.block_size)
    one = blocks * inference.block_size * kv_bytes_per_token(config, number)
    return one, inference.max_running * one


def _layer_parameters(config: ModelConfig, layer: int) -> int:
    width, inner, kv = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = 2 * width * inner + 2 * width * kv + 2 * width
    if config.sparse(layer):
        return attention + config.experts * (3 * width * config.expert_width + width)
    return attention + 3 * width * config.mlp_width


def _remembered(optimizer: Optimizer) -> int:
    """Numbers per weight that the optimizer keeps."""
    match optimizer:
        case AdamW() | Muon():  # Muon keeps two for embeddings and head, one for the rest
            return 2
        case Sgd(momentum=momentum):
            return int(momentum > 0)
    return 0


def _activations(settings: RlSettings, config: ModelConfig, number: int) -> int:
    """Of one micro-batch: what the blocks keep for the backward pass, and what one of them holds while it runs."""
    inner, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    mlp = max(config.mlp_width, config.experts_per_token * config.expert_width)
    # Inputs and outputs of the norms, projections, rotations, attention and the MLP's three products.
    block = 6 * config.width + 3 * inner + 4 * kv + 4 * mlp
    kept = {"off": block, "selective": config.width + inner, "full": config.width}
    activations = settings.trainer.activations
    layers = 0 if activations.offload else config.layers
    return settings.seq_len * number * (layers * kept[activations.checkpoint] + 2 * block)


def _head(settings: RlSettings, config: ModelConfig, number: int) -> int:
    """Logits of a chunk and their gradient; the weight's gradient adds up in float32."""
    chunk = min(settings.trainer.head_chunk, settings.seq_len)
    weight = 0 if settings.model.lora else (FLOAT32 + number) * config.vocab_size * config.width
    return chunk * config.vocab_size * (number + FLOAT32) + weight


def _staging(settings: RlSettings, config: ModelConfig, number: int) -> int:
    """What a version takes on its way to the engines: two buffers where they are mapped, else a tensor at a time."""
    if settings.model.lora is not None:
        return 2 * number * adapter_count(config, settings.model.lora)
    if settings.weights.type == "shared_memory":
        return 2 * number * parameter_count(config)
    return number * config.vocab_size * config.width
