"""A family that the package does not know: what a user writes in a file of their own.

Every other layer attends within a sliding window, with a sink per head; a part of each head is rotated; a sigmoid
router with a correction bias chooses experts, beside a shared expert that all tokens pass.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headway.models.checkpoint_tensors import CheckpointTensor, split_experts
from headway.models.configs.block import BlockShape
from headway.models.configs.cache import KvCache
from headway.models.configs.config import ModelConfig
from headway.models.family import Family

if TYPE_CHECKING:
    from headway.models.layers.block import Block


@dataclass(frozen=True)
class SinkMoeConfig(ModelConfig):
    window: int = 8
    shared_width: int = 32

    def window_of(self, layer: int) -> int | None:
        return self.window if layer % 2 == 0 else None


class SinkMoe(Family):
    model_type = "sink_moe"
    architecture = "SinkMoeForCausalLM"
    config_class = SinkMoeConfig
    hf_names = {
        "experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "moe_intermediate_size",
        "normalize_gates": "norm_topk_prob",
        "shared_width": "shared_expert_intermediate_size",
        "window": "sliding_window",
    }
    chat_format = "nemotron-3"

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        fields = super().fields_from_hf(hf)
        return fields | {"rotary_dim": int(fields["head_dim"] * hf["partial_rotary_factor"])}

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        factor = (config.rotary_dim or config.head_dim) / config.head_dim
        return super().fields_to_hf(config) | {"partial_rotary_factor": factor}

    def block(self, config: ModelConfig, layer: int) -> "Block":
        from headway.models.layers.attention import SelfAttention
        from headway.models.layers.block import Block
        from headway.models.layers.experts import SparseMlp
        from headway.models.layers.mlp import GatedMlp
        from headway.models.layers.norm import RMSNorm
        from headway.models.layers.router import ExpertRouter

        assert isinstance(config, SinkMoeConfig)
        window = config.window_of(layer)
        router = ExpertRouter(config, score="sigmoid", selection_bias=True)
        return Block(
            RMSNorm(config.width, config.norm_eps),
            SelfAttention(config, layer, qk_norm=False, window=window, sinks=window is not None),
            RMSNorm(config.width, config.norm_eps),
            SparseMlp(config, router=router, shared_experts=GatedMlp(config.width, config.shared_width)),
        )

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        return split_experts(parameter, config) or [CheckpointTensor(parameter)]

    def cache(self, config: ModelConfig, layer: int) -> KvCache:
        assert isinstance(config, SinkMoeConfig)
        return replace(super().cache(config, layer), window=config.window_of(layer))

    def block_shape(self, config: ModelConfig, layer: int) -> BlockShape:
        assert isinstance(config, SinkMoeConfig)
        shape, shared = super().block_shape(config, layer), config.shared_width
        into, out = (config.width, shared), (shared, config.width)
        return replace(
            shape,
            linears={**shape.linears, "gate_proj": into, "up_proj": into, "down_proj": out},
            vectors=shape.vectors + config.experts + (config.heads if config.window_of(layer) else 0),
            mlp_width=shape.mlp_width + shared,
        )
