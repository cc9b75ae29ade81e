"""AFMoE (Arcee's Trinity): gated attention, within sliding windows that have rotary positions and now and then over all
tokens without; norms before and after each stage; experts chosen by sigmoid scores, beside shared ones."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headway.models.checkpoint_tensors import CheckpointTensor, renamed, split_experts
from headway.models.configs.block import BlockShape
from headway.models.configs.config import ModelConfig
from headway.models.configs.layer_types import layer_types_to_hf, window_layers
from headway.models.family import Family

if TYPE_CHECKING:
    from headway.models.layers.attention import SelfAttention
    from headway.models.layers.block import Block
    from headway.models.layers.mlp import FeedForward

_CHECKPOINT_NAMES = {
    ".mlp.gate.weight": ".mlp.router.gate.weight",
    ".mlp.gate.e_score_correction_bias": ".mlp.expert_bias",
    "_feedforward_layernorm": "_mlp_layernorm",
}
_ONLY = {
    "score_func": "sigmoid",
    "route_norm": True,
    "n_group": 1,
    "num_expert_groups": 1,
    "topk_group": 1,
    "num_limited_groups": 1,
}
_FULL_EVERY = "global_attn_every_n_layers"


@dataclass(frozen=True)
class AfmoeConfig(ModelConfig):
    norm_eps: float = 1e-5
    normalize_gates: bool = True


class Afmoe(Family):
    model_type = "afmoe"
    architecture = "AfmoeForCausalLM"
    examples = "Trinity"
    notes = "gated attention, windows with and full attention without rotary positions, norms around each stage"
    config_class = AfmoeConfig
    hf_names = {
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "moe_intermediate_size",
        "gate_scale": "route_scale",
        "window": "sliding_window",
    }
    hf_reads = ("layer_types", "mup_enabled", "num_dense_layers", "num_shared_experts", _FULL_EVERY)
    hf_fixed = _ONLY
    hf_ignored = ("load_balance_coeff", "use_grouped_mm")
    qk_norm = True
    block_norms = 4

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        fields = super().fields_from_hf(hf)
        return fields | {
            "window_layers": window_layers(hf, full_every=hf.get(_FULL_EVERY, 4)),
            "dense_layers": tuple(range(hf.get("num_dense_layers", 1))),
            "shared_expert_width": fields["expert_width"] * hf.get("num_shared_experts", 2),
            "embedding_scale": math.sqrt(fields["width"]) if hf.get("mup_enabled") else 1.0,
        }

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        return super().fields_to_hf(config) | {
            **_ONLY,  # vLLM reads them
            "layer_types": layer_types_to_hf(config),
            "mup_enabled": config.embedding_scale != 1,
            "num_dense_layers": len(config.dense_layers),
            "num_shared_experts": config.shared_expert_width // config.expert_width,
        }

    def block(self, config: ModelConfig, layer: int) -> "Block":
        from headway.models.layers.block import SandwichBlock

        attention, feed_forward = self.attention(config, layer), self.feed_forward(config, layer)
        return SandwichBlock(lambda: self.stream_norm(config), attention, feed_forward)

    def attention(self, config: ModelConfig, layer: int) -> "SelfAttention":
        from headway.models.layers.attention import GatedAttention

        window = config.window_of(layer)
        return GatedAttention(config, layer, qk_norm=True, window=window, rotary=None if window is None else 0)

    def feed_forward(self, config: ModelConfig, layer: int) -> "FeedForward":
        from headway.models.layers.experts import biased_feed_forward

        return biased_feed_forward(config, layer)

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        return split_experts(parameter, config) or [CheckpointTensor(renamed(parameter, _CHECKPOINT_NAMES))]

    def block_shape(self, config: ModelConfig, layer: int) -> BlockShape:
        shape = super().block_shape(config, layer)
        gate = {"self_attn.gate_proj": (config.width, shape.query_width)}
        return replace(
            shape, linears={**shape.linears, **gate}, vectors=shape.vectors + config.sparse(layer) * config.experts
        )
