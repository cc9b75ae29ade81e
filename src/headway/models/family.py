"""A family of models: everything Headway knows about it, in one object."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.core.errors import UsageError
from headway.models.config import HF_NAMES, ModelConfig, fields_from_hf, fields_to_hf

if TYPE_CHECKING:
    from headway.models.layers.block import Block


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """The tensor called `name` in the checkpoint is `parameter[at]` here."""

    name: str
    at: tuple[int | slice, ...] = ()


@dataclass(frozen=True)
class KvCache:
    """Keys and values that a layer keeps of a token while serving; of the last `window` tokens, if that is set."""

    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def numbers(self) -> int:
        """Numbers kept per token."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class BlockShape:
    """The sizes of one block, from which FLOPs and bytes follow (`headway.models.costs`).

    `linears` are (inputs, outputs) by the name that adapters target; `vectors` counts the weights of norms and biases;
    `query_width` is heads x head size; `mlp_width` is how many numbers the MLP computes for a token. Every token passes
    `experts_per_token` of `experts`, each of `expert_weights`.
    """

    linears: Mapping[str, tuple[int, int]]
    vectors: int
    query_width: int
    mlp_width: int
    cache: KvCache
    router_weights: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_weights: int = 0

    @property
    def weights(self) -> int:
        """All parameters."""
        return self._always_used + self.vectors + self.experts * self.expert_weights

    @property
    def active_weights(self) -> int:
        """The weights that multiply one token."""
        return self._always_used + self.experts_per_token * self.expert_weights

    @property
    def _always_used(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.linears.values()) + self.router_weights


class Family:
    """A pre-norm decoder with grouped-query attention and gated MLPs; a family overrides what it does differently.

    Configs, sizes and chat formats are asked for by processes without torch: a family's module imports no torch, and
    methods that build layers import these when called.
    """

    model_type: str
    """Its name in config.json."""
    architecture: str
    """Hugging Face's class, for exported checkpoints."""
    config_class: type[ModelConfig] = ModelConfig
    hf_names: Mapping[str, str] = {}
    """Fields of its config and their names in config.json, beside those that all families have."""
    chat_format: str | None = None
    """The format of the `renderers` package that is tried for its chat template."""
    gguf_architecture: str | None = None
    """llama.cpp's name for it, where GGUF files of it can be read."""
    gguf_interleaved_rotary = False
    """llama.cpp stores the two halves of each rotary head interleaved."""
    qk_norm = False
    """Queries and keys are normalized per head before they are rotated."""

    def config_from_hf(self, hf: dict[str, Any]) -> ModelConfig:
        """Read config.json as transformers 4 or 5 writes it. Raises UsageError for what is not supported."""
        try:
            self.check_hf(hf)
            return self.config_class(family=self.model_type, **self.fields_from_hf(hf))
        except KeyError as error:
            raise UsageError(f"it lacks {error.args[0]!r}") from None

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Write config.json as transformers does, readable by versions 4 and 5."""
        names = {"architectures": [self.architecture], "model_type": self.model_type}
        return dict(sorted((names | self.fields_to_hf(config)).items()))

    def check_hf(self, hf: dict[str, Any]) -> None:
        """Raise UsageError for settings that this family's blocks do not implement."""
        if hf.get("hidden_act", "silu") != "silu":
            raise UsageError(f"activation {hf['hidden_act']!r} is not supported (only silu)")
        if hf.get("use_sliding_window"):
            raise UsageError("sliding-window attention is not supported; set use_sliding_window to false")

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        """The config's fields; a KeyError means that config.json lacks that entry."""
        return fields_from_hf(hf, self.config_class, {**HF_NAMES, **self.hf_names})

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        return fields_to_hf(config, {**HF_NAMES, **self.hf_names})

    def block(self, config: ModelConfig, layer: int) -> "Block":
        """Build block number `layer`; its weights are unset."""
        from headway.models.layers.block import make_block  # torch

        return make_block(config, layer, qk_norm=self.qk_norm)

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        """The tensors of a checkpoint that the parameter of this name is made of."""
        return [CheckpointTensor(parameter)]

    def cache(self, config: ModelConfig, layer: int) -> KvCache:
        """Describe what layer number `layer` keeps of a token while serving."""
        return KvCache(config.kv_heads, config.head_dim)

    def block_shape(self, config: ModelConfig, layer: int) -> BlockShape:
        """The sizes of block number `layer`."""
        width, queries, keys = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
        linears = {"q_proj": (width, queries), "k_proj": (width, keys), "v_proj": (width, keys)}
        linears["o_proj"] = (queries, width)
        vectors = 2 * width + config.attention_bias * (queries + 2 * keys + width) + self.qk_norm * 2 * config.head_dim
        cache = self.cache(config, layer)
        if config.sparse(layer):
            return BlockShape(
                linears,
                vectors,
                queries,
                config.experts_per_token * config.expert_width,
                cache,
                router_weights=config.experts * width,
                experts=config.experts,
                experts_per_token=config.experts_per_token,
                expert_weights=3 * width * config.expert_width,
            )
        mlp = config.mlp_width
        linears |= {"gate_proj": (width, mlp), "up_proj": (width, mlp), "down_proj": (mlp, width)}
        return BlockShape(linears, vectors + config.mlp_bias * (2 * mlp + width), queries, mlp, cache)


def split_experts(parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
    """The tensors of stacked experts (gate above up): three matrices of each in the checkpoint. Empty for other
    parameters."""
    prefix, found, projection = parameter.partition(".mlp.experts.")
    if not found:
        return []
    width, experts = config.expert_width, [f"{prefix}.mlp.experts.{e}" for e in range(config.experts)]
    if projection == "down_proj":
        return [CheckpointTensor(f"{expert}.down_proj.weight", (e,)) for e, expert in enumerate(experts)]
    gate, up = slice(0, width), slice(width, 2 * width)
    return [
        tensor
        for e, expert in enumerate(experts)
        for tensor in (
            CheckpointTensor(f"{expert}.gate_proj.weight", (e, gate)),
            CheckpointTensor(f"{expert}.up_proj.weight", (e, up)),
        )
    ]
