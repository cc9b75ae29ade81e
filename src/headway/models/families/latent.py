"""The base of families with latent attention (MLA): sizes, config.json, costs. Imports no torch."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.models.checkpoint_tensors import CheckpointTensor, behind_last_layer, split_experts
from headway.models.configs.block import BlockShape
from headway.models.configs.cache import KvCache
from headway.models.configs.config import ModelConfig
from headway.models.configs.latent import LatentConfig
from headway.models.configs.rotary import rope_to_hf
from headway.models.family import Family

if TYPE_CHECKING:
    from headway.models.layers.attention import Attention
    from headway.models.layers.mlp import FeedForward


class LatentFamily(Family):
    """Latent attention, and experts with a sigmoid router as DeepSeek-V3 has them."""

    config_class = LatentConfig
    hf_names = {
        "q_rank": "q_lora_rank",
        "kv_rank": "kv_lora_rank",
        "nope_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim",
        "v_dim": "v_head_dim",
        "experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "moe_intermediate_size",
        "normalize_gates": "norm_topk_prob",
        "gate_scale": "routed_scaling_factor",
        "expert_groups": "n_group",
        "groups_per_token": "topk_group",
    }

    hf_reads: Collection[str] = ("n_shared_experts", "first_k_dense_replace")
    hf_fixed: Mapping[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    hf_ignored: Collection[str] = (  # sums of other sizes, losses of another trainer, layers that are not kept
        *("head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers"),
    )

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        hf = {**hf, "head_dim": hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]}
        shared = (hf.get("n_shared_experts") or 0) * hf["moe_intermediate_size"]
        rest = {"rotary_dim": hf["qk_rope_head_dim"], "shared_expert_width": shared}
        return super().fields_from_hf(hf) | rest | {"dense_layers": self.dense_layers(hf)}

    def dense_layers(self, hf: dict[str, Any]) -> tuple[int, ...]:
        """The layers without experts."""
        return tuple(range(min(hf.get("first_k_dense_replace") or 0, hf["num_hidden_layers"])))

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, LatentConfig)
        # All of what transformers calls a head is rotated.
        rope = rope_to_hf(config.rope, config.rope_dim)
        own = {name: value for name, value in super().fields_to_hf(config).items() if name != "partial_rotary_factor"}
        # vLLM has softmax scores without a correction bias where config.json says nothing.
        return (
            own
            | rope
            | dict(self.hf_fixed)
            | {
                "head_dim": config.rope_dim,
                "first_k_dense_replace": len(config.dense_layers),
                "num_nextn_predict_layers": 0,
                "n_shared_experts": config.shared_expert_width // config.expert_width,
            }
        )

    def attention(self, config: ModelConfig, layer: int) -> "Attention":
        from headway.models.layers.latent import LatentAttention  # torch

        assert isinstance(config, LatentConfig)
        return LatentAttention(config, layer)

    def feed_forward(self, config: ModelConfig, layer: int) -> "FeedForward":
        from headway.models.layers.experts import biased_feed_forward

        return biased_feed_forward(config, layer)

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        return split_experts(parameter, config) or [CheckpointTensor(parameter)]

    def skips_tensor(self, name: str, config: ModelConfig) -> bool:
        return behind_last_layer(name, config)

    def cache(self, config: ModelConfig, layer: int) -> KvCache:
        assert isinstance(config, LatentConfig)
        return KvCache(
            kv_heads=1,
            head_dim=config.kv_rank + config.rope_dim,
            value_dim=config.kv_rank,
            values_in_keys=True,
            index_dim=config.index_dim if config.chosen_by(layer) == layer else 0,
        )

    def block_shape(self, config: ModelConfig, layer: int) -> BlockShape:
        assert isinstance(config, LatentConfig)
        shape, width = super().block_shape(config, layer), config.width
        queries, row = config.heads * config.head_dim, config.kv_rank + config.rope_dim
        linears = {"kv_a_proj_with_mqa": (width, row)}
        linears["kv_b_proj"] = (config.kv_rank, config.heads * (config.nope_dim + config.v_dim))
        linears["o_proj"] = (config.heads * config.v_dim, width)
        if config.q_rank is None:
            linears["q_proj"] = (width, queries)
        else:
            linears |= {"q_a_proj": (width, config.q_rank), "q_b_proj": (config.q_rank, queries)}
        linears |= {name: size for name, size in shape.linears.items() if name in ("gate_proj", "up_proj", "down_proj")}
        rank, chooses = config.q_rank or 0, config.chosen_by(layer) == layer
        vectors = 2 * width + rank + config.kv_rank + config.attention_bias * (rank + row + width) + shape.experts
        index = config.index_heads * config.index_dim if chooses else 0
        index_weights = (rank * index + width * (config.index_dim + config.index_heads)) if chooses else 0
        return replace(
            shape,
            linears=linears,
            vectors=vectors + 2 * config.index_dim * chooses,
            value_width=config.heads * config.v_dim,
            router_weights=shape.router_weights + index_weights,
            most_keys=config.index_count or None,
            index_width=index,
        )
