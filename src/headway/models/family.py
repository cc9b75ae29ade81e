"""A family of models: everything Headway knows about it, in one object."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from headway.base.errors import UsageError
from headway.models.checkpoint_tensors import CheckpointTensor
from headway.models.configs.block import BlockShape
from headway.models.configs.cache import KvCache, LayerCache
from headway.models.configs.config import HF_NAMES, ModelConfig, fields_from_hf, fields_to_hf
from headway.models.configs.rotary import DEFAULT_ROPE_THETA, RopeParameters

if TYPE_CHECKING:
    from torch import Tensor

    from headway.models.decoder import DecoderLM
    from headway.models.layers.attention import Attention
    from headway.models.layers.block import Block
    from headway.models.layers.mlp import FeedForward
    from headway.models.layers.norm import RMSNorm


READ_KEYS = frozenset({"eos_token_id", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"})
"""Entries of config.json that every family reads, beside its `names`."""
FIXED_KEYS: Mapping[str, Any] = {"attention_dropout": 0.0, "is_encoder_decoder": False, "chunk_size_feed_forward": 0}
"""Entries that would change what is computed, and the one value that is implemented."""
IGNORED_KEYS = frozenset(
    [
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "id2label",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "return_dict",
        "router_aux_loss_coef",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    ]
)
"""Entries that do not change logits: names, outputs, losses of another trainer, and how weights are stored, which
whoever reads these minds."""


class Family:
    """A pre-norm decoder with grouped-query attention and gated MLPs; a family overrides what it does differently.

    Configs, sizes and chat formats are asked for by processes without torch: a family's module imports no torch, and
    methods that build layers import these when called.
    """

    model_type: str
    """Its name in config.json."""
    aliases: tuple[str, ...] = ()
    """Other names in config.json of models that are computed alike; what is written has the family's own."""
    architecture: str
    """Hugging Face's class, for exported checkpoints."""
    config_class: type[ModelConfig] = ModelConfig
    hf_names: Mapping[str, str] = {}
    """Fields of its config and their names in config.json, beside those that all families have."""
    examples = ""
    """Models of the family, for the table of families in docs/models.md."""
    notes = ""
    """What sets it apart, for the same table."""
    chat_format: str | None = None
    """The format of the `renderers` package that is tried for its chat template."""
    gguf_architecture: str | None = None
    """llama.cpp's name for it, where GGUF files of it can be read."""
    gguf_interleaved_rotary = False
    """llama.cpp stores the two halves of each rotary head interleaved."""
    qk_norm: bool | Literal["all"] = False
    """Queries and keys are normalized before they are rotated: per head, or over all heads at once."""
    block_norms = 2
    """Norms of the stream in a block."""
    plain_experts = True
    """Its experts, where it has some, are SiLU-gated MLPs without biases: one operation in training."""
    hf_defaults: Mapping[str, Any] = {}
    """Values of entries that config.json may lack, where these are not the defaults of our fields."""
    hf_reads: Collection[str] = ()
    """Entries of config.json that its own `fields_from_hf` reads, beside `hf_names`."""
    hf_fixed: Mapping[str, Any] = {}
    """Entries that would change what is computed, and the one value of each that the family implements."""
    hf_ignored: Collection[str] = ()
    """Entries that do not change what is computed, beside those that no family minds."""
    hf_absent: Collection[str] = ()
    """Fields that all families have, but this one has no entry for."""
    activations: Collection[str] = ("silu",)
    """Activations of its MLPs."""
    rope_theta = DEFAULT_ROPE_THETA
    """The base of rotary frequencies where config.json names none."""
    rope_ignored: Collection[str] = ()
    """Entries of `rope_parameters` that do not change what the family computes."""

    def config_from_hf(self, hf: dict[str, Any]) -> ModelConfig:
        """Read config.json as transformers 4 or 5 writes it. Raises UsageError for what is not supported."""
        try:
            self.check_hf(hf)
            given = {name: value for name, value in hf.items() if value is not None}
            return self.config_class(family=self.model_type, **self.fields_from_hf({**self.hf_defaults, **given}))
        except KeyError as error:
            raise UsageError(f"it lacks {error.args[0]!r}") from None

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Write config.json as transformers does, readable by versions 4 and 5."""
        names = {"architectures": [self.architecture], "model_type": self.model_type}
        return dict(sorted((names | self.fields_to_hf(config)).items()))

    def check_hf(self, hf: dict[str, Any]) -> None:
        """Raise UsageError for an entry of config.json that this family would ignore or does not implement."""
        fixed = {**FIXED_KEYS, **self.hf_fixed}
        read = {*READ_KEYS, *self.names.values(), *self.hf_reads}
        for key, value in hf.items():
            if value is None or key in IGNORED_KEYS or key in self.hf_ignored:
                continue
            if key in fixed:
                if value != fixed[key]:
                    raise UsageError(
                        f"{key} {value!r} is not supported by the family {self.model_type!r} (only {fixed[key]!r})"
                    )
            elif key not in read:
                raise UsageError(
                    f"the family {self.model_type!r} would ignore {key} = {value!r}; if it does not change what the "
                    "model computes, remove it from config.json"
                )
        activation = self.names["activation"]
        if hf.get(activation) is not None and hf[activation] not in self.activations:
            raise self._unsupported(activation, hf[activation], ", ".join(self.activations))

    def _unsupported(self, key: str, value: Any, known: str) -> UsageError:
        return UsageError(f"{key} {value!r} is not supported by the family {self.model_type!r} (only {known})")

    @property
    def names(self) -> dict[str, str]:
        """Fields of its config and their names in config.json."""
        names = {**HF_NAMES, **self.hf_names}
        return {field: name for field, name in names.items() if field not in self.hf_absent}

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        """The config's fields; a KeyError means that config.json lacks that entry."""
        return fields_from_hf(hf, self.config_class, self.names, theta=self.rope_theta, rope_ignored=self.rope_ignored)

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        return fields_to_hf(config, self.names)

    def model(self, config: ModelConfig) -> "DecoderLM":
        """Build a model; its weights are unset."""
        from headway.models.decoder import DecoderLM  # torch

        return DecoderLM(config, self.block, norm=self.norm_class(), ropes=self.ropes(config))

    def block(self, config: ModelConfig, layer: int) -> "Block":
        """Build block number `layer`; its weights are unset."""
        from headway.models.layers.block import Block  # torch

        input_norm, post_attention_norm = self.stream_norm(config), self.stream_norm(config)
        return Block(input_norm, self.attention(config, layer), post_attention_norm, self.feed_forward(config, layer))

    def attention(self, config: ModelConfig, layer: int) -> "Attention":
        """Build the first stage of block number `layer`."""
        from headway.models.layers.attention import SelfAttention

        return SelfAttention(config, layer, **self.attention_options(config, layer))

    def attention_options(self, config: ModelConfig, layer: int) -> dict[str, Any]:
        """The options of `SelfAttention` that layer number `layer` takes."""
        return {"qk_norm": self.qk_norm, "norm": self.norm_class(), "window": config.window_of(layer)}

    def feed_forward(self, config: ModelConfig, layer: int) -> "FeedForward":
        """Build the second stage: a gated MLP, or a mixture of experts in the layers that `config` says."""
        from headway.models.layers.experts import SparseMlp
        from headway.models.layers.mlp import GatedMlp

        if config.sparse(layer):
            return SparseMlp(config)
        return GatedMlp(config.width, config.mlp_width, config.mlp_bias, config.activation)

    def norm_class(self) -> "type[RMSNorm]":
        """The class of norms in blocks and of the final one."""
        from headway.models.layers.norm import RMSNorm

        return RMSNorm

    def stream_norm(self, config: ModelConfig) -> "RMSNorm":
        return self.norm_class()(config.width, config.norm_eps)

    def ropes(self, config: ModelConfig) -> Sequence[RopeParameters]:
        """The rotary positions that layers choose from (`SelfAttention.rotary`)."""
        return (config.rope,)

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        """The tensors of a checkpoint that the parameter of this name is made of, as they are written. A parameter that
        is made of several is also read whole, under its own name."""
        return [CheckpointTensor(parameter)]

    def own_name(self, name: str, config: ModelConfig) -> str:
        """The name here of a parameter that a checkpoint holds whole."""
        return name

    def module_name(self, name: str) -> str:
        """The name in Hugging Face's model of a module that is called `name` here, for adapters."""
        return name

    def as_written(self, name: str, tensor: "Tensor", config: ModelConfig) -> "Tensor":
        """A tensor of a checkpoint as this family writes it, where some checkpoints have another layout of it."""
        return tensor

    def skips_tensor(self, name: str, config: ModelConfig) -> bool:
        """Tell whether a tensor of a checkpoint belongs to a part of the model that is not computed here."""
        return False

    def more_weights(self, config: ModelConfig) -> int:
        """Count the parameters beside embeddings, blocks, the final norm and the head."""
        return 0

    def cache(self, config: ModelConfig, layer: int) -> LayerCache:
        """Describe what layer number `layer` keeps while serving."""
        return KvCache(config.kv_heads, config.head_dim, config.window_of(layer))

    def block_shape(self, config: ModelConfig, layer: int) -> BlockShape:
        """The sizes of block number `layer`."""
        width, queries, keys = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
        linears = {"q_proj": (width, queries), "k_proj": (width, keys), "v_proj": (width, keys)}
        linears["o_proj"] = (queries, width)
        output_bias = config.attention_bias if config.output_bias is None else config.output_bias
        norms = queries + keys if self.qk_norm == "all" else self.qk_norm * 2 * config.head_dim
        biases = config.attention_bias * (queries + 2 * keys) + output_bias * width
        vectors = self.block_norms * width + biases + norms
        cache = self.cache(config, layer)
        if config.sparse(layer):
            if shared := config.shared_expert_width:
                linears |= {"gate_proj": (width, shared), "up_proj": (width, shared), "down_proj": (shared, width)}
            return BlockShape(
                linears,
                vectors,
                queries,
                config.experts_per_token * config.expert_width + shared,
                cache,
                router_weights=config.experts * width,
                experts=config.experts,
                experts_per_token=config.experts_per_token,
                expert_weights=3 * width * config.expert_width,
                expert_sides=2 * width + 3 * config.expert_width,
            )
        mlp = config.mlp_width
        linears |= {"gate_proj": (width, mlp), "up_proj": (width, mlp), "down_proj": (mlp, width)}
        return BlockShape(linears, vectors + config.mlp_bias * (2 * mlp + width), queries, mlp, cache)
