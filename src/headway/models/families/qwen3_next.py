"""Qwen3-Next: gated delta nets, every few layers gated attention; experts with a shared one, or a gated MLP."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headway.base.errors import UsageError
from headway.models.checkpoint_tensors import CheckpointTensor, renamed, split_experts
from headway.models.configs.block import BlockShape
from headway.models.configs.cache import LayerCache
from headway.models.configs.config import ModelConfig
from headway.models.configs.recurrent import DeltaNetShape
from headway.models.family import Family

if TYPE_CHECKING:
    from headway.models.layers.attention import SelfAttention
    from headway.models.layers.block import Block
    from headway.models.layers.delta_net import GatedDeltaNet
    from headway.models.layers.mlp import FeedForward
    from headway.models.layers.norm import RMSNorm

NAMES = {".shared_experts.gate.": ".shared_expert_gate.", ".shared_experts.": ".shared_expert."}
"""Parts of parameters' names here and in checkpoints."""


@dataclass(frozen=True)
class DeltaNetConfig(ModelConfig):
    """`linear_layers` have a gated delta net of these sizes in place of attention."""

    linear_layers: tuple[int, ...] = ()
    linear_key_heads: int = 16
    linear_value_heads: int = 32
    linear_key_dim: int = 128
    linear_value_dim: int = 128
    linear_conv_width: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linear_value_heads % self.linear_key_heads:
            keys, values = self.linear_key_heads, self.linear_value_heads
            raise UsageError(f"linear_num_key_heads ({keys}) must divide linear_num_value_heads ({values})")

    @property
    def delta_net(self) -> DeltaNetShape:
        return DeltaNetShape(
            self.linear_key_heads,
            self.linear_value_heads,
            self.linear_key_dim,
            self.linear_value_dim,
            self.linear_conv_width,
        )


class Qwen3Next(Family):
    model_type = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    examples = "Qwen3-Next-80B-A3B"
    notes = "gated delta nets and gated attention ([recurrent layers](#recurrent-layers)); a gated shared expert"
    config_class = DeltaNetConfig
    hf_names = {
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "moe_intermediate_size",
        "shared_expert_width": "shared_expert_intermediate_size",
        "normalize_gates": "norm_topk_prob",
        "linear_key_heads": "linear_num_key_heads",
        "linear_value_heads": "linear_num_value_heads",
        "linear_key_dim": "linear_key_head_dim",
        "linear_value_dim": "linear_value_head_dim",
        "linear_conv_width": "linear_conv_kernel_dim",
    }
    hf_reads: Collection[str] = ("decoder_sparse_step", "mlp_only_layers", "layer_types", "full_attention_interval")
    hf_fixed = {"attn_output_gate": True}
    hf_ignored = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    chat_format = "qwen3"
    qk_norm = True

    def check_hf(self, hf: dict[str, Any]) -> None:
        super().check_hf(hf)
        if unknown := set(hf.get("layer_types") or ()) - {"linear_attention", "full_attention"}:
            raise UsageError(f"layer_types {', '.join(map(str, unknown))} are not supported")

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        hf = {"partial_rotary_factor": 0.25, "norm_topk_prob": True, **hf}
        fields = super().fields_from_hf(hf)
        layers = range(fields["layers"])
        every = hf.get("full_attention_interval", 4)
        kinds = hf.get("layer_types") or [
            "full" if (layer + 1) % every == 0 else "linear_attention" for layer in layers
        ]
        if len(kinds) != len(layers):
            raise UsageError(f"layer_types must name all {len(layers)} layers (got {len(kinds)})")
        step = hf.get("decoder_sparse_step", 1)
        dense = {layer for layer in layers if (layer + 1) % step}.union(hf.get("mlp_only_layers") or ())
        return fields | {
            "linear_layers": tuple(layer for layer in layers if kinds[layer] == "linear_attention"),
            "dense_layers": tuple(sorted(dense)) if fields.get("experts") else (),
        }

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, DeltaNetConfig)
        linear = set(config.linear_layers)
        kinds = ["linear_attention" if layer in linear else "full_attention" for layer in range(config.layers)]
        own = {"layer_types": kinds, "mlp_only_layers": list(config.dense_layers), "decoder_sparse_step": 1}
        return super().fields_to_hf(config) | own

    def block(self, config: ModelConfig, layer: int) -> "Block":
        from headway.models.layers.hybrid import LinearAttentionBlock  # torch

        assert isinstance(config, DeltaNetConfig)
        if layer not in config.linear_layers:
            return super().block(config, layer)
        norm, post_norm = self.stream_norm(config), self.stream_norm(config)
        return LinearAttentionBlock(norm, self.delta_net(config, layer), post_norm, self.feed_forward(config, layer))

    def delta_net(self, config: DeltaNetConfig, layer: int) -> "GatedDeltaNet":
        from headway.models.layers.delta_net import GroupedDeltaNet

        return GroupedDeltaNet(config.width, config.delta_net, layer, config.norm_eps)

    def attention(self, config: ModelConfig, layer: int) -> "SelfAttention":
        from headway.models.layers.attention import QueryGatedAttention

        return QueryGatedAttention(config, layer, qk_norm=True, norm=self.norm_class())

    def feed_forward(self, config: ModelConfig, layer: int) -> "FeedForward":
        from headway.models.layers.experts import SigmoidGatedMlp, SparseMlp

        if not config.sparse(layer):
            return super().feed_forward(config, layer)
        return SparseMlp(config, shared_experts=SigmoidGatedMlp(config.width, config.shared_expert_width))

    def norm_class(self) -> "type[RMSNorm]":
        from headway.models.layers.norm import ZeroCenteredRMSNorm

        return ZeroCenteredRMSNorm

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        return split_experts(parameter, config) or [CheckpointTensor(renamed(parameter, NAMES))]

    def skips_tensor(self, name: str, config: ModelConfig) -> bool:
        """The layers that predict several tokens at once are not trained, nor served."""
        return name.startswith("mtp.")

    def cache(self, config: ModelConfig, layer: int) -> LayerCache:
        assert isinstance(config, DeltaNetConfig)
        return config.delta_net.state if layer in config.linear_layers else super().cache(config, layer)

    def block_shape(self, config: ModelConfig, layer: int) -> BlockShape:
        assert isinstance(config, DeltaNetConfig)
        shape, width = super().block_shape(config, layer), config.width
        linears = dict(shape.linears)
        router = shape.router_weights + (width if config.sparse(layer) else 0)
        if layer not in config.linear_layers:
            linears["q_proj"] = (width, 2 * shape.query_width)
            vectors = shape.vectors + config.attention_bias * shape.query_width
            return replace(shape, linears=linears, vectors=vectors, router_weights=router)
        net = config.delta_net
        kept = {name: sizes for name, sizes in linears.items() if name in ("gate_proj", "up_proj", "down_proj")}
        return replace(
            shape,
            linears={**self.delta_net_linears(net, width), **kept, "out_proj": (net.values, width)},
            vectors=2 * width + 2 * net.value_heads + net.value_dim,
            query_width=0,
            router_weights=router,
            conv_weights=net.channels * net.conv_width,
            state_products=net.products,
        )

    def delta_net_linears(self, net: DeltaNetShape, width: int) -> dict[str, tuple[int, int]]:
        return {"in_proj_qkvz": (width, net.channels + net.values), "in_proj_ba": (width, 2 * net.value_heads)}
