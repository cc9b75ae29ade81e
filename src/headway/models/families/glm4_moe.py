"""GLM-4.5 and models of its shape (INTELLECT-3): partly rotated attention; after some dense layers, experts chosen by
sigmoid scores with a correction bias, from groups where the config says so, beside shared experts."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headway.models.checkpoint_tensors import CheckpointTensor, behind_last_layer, split_experts
from headway.models.configs.block import BlockShape
from headway.models.configs.config import ModelConfig
from headway.models.family import Family

if TYPE_CHECKING:
    from headway.models.layers.attention import SelfAttention
    from headway.models.layers.mlp import FeedForward


@dataclass(frozen=True)
class Glm4MoeConfig(ModelConfig):
    norm_eps: float = 1e-5
    output_bias: bool | None = False
    normalize_gates: bool = True
    qk_norm: bool = False


class Glm4Moe(Family):
    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    examples = "GLM-4.5, GLM-4.5-Air, INTELLECT-3"
    notes = "sigmoid router with correction bias, groups, shared experts; MTP layers are left out"
    config_class = Glm4MoeConfig
    hf_names = {
        "experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "moe_intermediate_size",
        "normalize_gates": "norm_topk_prob",
        "gate_scale": "routed_scaling_factor",
        "expert_groups": "n_group",
        "groups_per_token": "topk_group",
        "qk_norm": "use_qk_norm",
    }
    hf_reads = ("n_shared_experts", "first_k_dense_replace")
    hf_ignored = ("num_nextn_predict_layers",)
    chat_format = "glm-4.5"

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        fields = super().fields_from_hf({"partial_rotary_factor": 0.5, **hf})
        return fields | {
            "dense_layers": tuple(range(hf.get("first_k_dense_replace", 1))),
            "shared_expert_width": fields["expert_width"] * hf.get("n_shared_experts", 1),
        }

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        fields = super().fields_to_hf(config)
        # Half of each head is rotated where config.json says nothing.
        share = {"partial_rotary_factor": config.rope.dim / config.head_dim}
        return fields | {
            **share,
            "rope_parameters": fields["rope_parameters"] | share,
            "first_k_dense_replace": len(config.dense_layers),
            "n_shared_experts": config.shared_expert_width // config.expert_width,
            "num_nextn_predict_layers": 0,  # layers that predict tokens further ahead are not kept
        }

    def attention(self, config: ModelConfig, layer: int) -> "SelfAttention":
        from headway.models.layers.attention import SelfAttention

        assert isinstance(config, Glm4MoeConfig)
        return SelfAttention(config, layer, qk_norm=config.qk_norm)

    def feed_forward(self, config: ModelConfig, layer: int) -> "FeedForward":
        from headway.models.layers.experts import biased_feed_forward

        return biased_feed_forward(config, layer)

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        return split_experts(parameter, config) or [CheckpointTensor(parameter)]

    def skips_tensor(self, name: str, config: ModelConfig) -> bool:
        return behind_last_layer(name, config)

    def block_shape(self, config: ModelConfig, layer: int) -> BlockShape:
        assert isinstance(config, Glm4MoeConfig)
        shape = super().block_shape(config, layer)
        return replace(
            shape,
            vectors=shape.vectors + config.qk_norm * 2 * config.head_dim + config.sparse(layer) * config.experts,
        )
