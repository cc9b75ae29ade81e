"""MiniMax-M2: partly rotated attention with norms over all heads; experts in all layers, chosen by sigmoid scores with
a correction bias."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headway.base.errors import UsageError
from headway.models.checkpoint_tensors import CheckpointTensor, renamed, split_experts
from headway.models.configs.block import BlockShape
from headway.models.configs.config import ModelConfig
from headway.models.family import Family

if TYPE_CHECKING:
    from headway.models.layers.mlp import FeedForward

_CHECKPOINT_NAMES = {
    ".mlp.gate.e_score_correction_bias": ".block_sparse_moe.e_score_correction_bias",
    ".mlp.": ".block_sparse_moe.",
}


@dataclass(frozen=True)
class MiniMaxM2Config(ModelConfig):
    normalize_gates: bool = True


class MiniMaxM2(Family):
    model_type = "minimax_m2"
    architecture = "MiniMaxM2ForCausalLM"
    examples = "MiniMax-M2"
    notes = "norms over all heads; FP8 weights are unpacked at load"
    config_class = MiniMaxM2Config
    hf_names = {
        "experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "intermediate_size",
    }
    hf_reads = ("rotary_dim", "attn_type_list")
    hf_fixed = {
        "attention_bias": False,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "qk_norm_type": "per_layer",
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }
    hf_ignored = (  # of layers that it does not have
        "layernorm_linear_attention_beta",
        "mlp_intermediate_size",
        "mtp_transformer_layers",
        "num_mtp_modules",
        "shared_moe_mode",
        "use_mtp",
    )
    chat_format = "minimax-m2"
    qk_norm = "all"
    rope_theta = 5_000_000.0

    def check_hf(self, hf: dict[str, Any]) -> None:
        super().check_hf(hf)
        if set(hf.get("attn_type_list") or ()) - {1}:
            raise UsageError("attn_type_list must be 1 for all layers: linear attention is not supported")

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        # Released checkpoints say how many numbers of a head are rotated; transformers writes their share.
        rotated = {"partial_rotary_factor": hf["rotary_dim"] / hf["head_dim"]} if hf.get("rotary_dim") else {}
        return super().fields_from_hf({**rotated, **hf})

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        # Those that vLLM reads, as released checkpoints have them.
        own = {name: self.hf_fixed[name] for name in ("scoring_func", "use_qk_norm", "use_routing_bias")}
        return super().fields_to_hf(config) | own | {"rotary_dim": config.rope.dim}

    def feed_forward(self, config: ModelConfig, layer: int) -> "FeedForward":
        from headway.models.layers.experts import SparseMlp
        from headway.models.layers.router import ExpertRouter

        return SparseMlp(config, router=ExpertRouter(config, score="sigmoid", selection_bias=True))

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        tensors = split_experts(parameter, config, ("w1", "w3", "w2")) or [CheckpointTensor(parameter)]
        return [replace(tensor, name=renamed(tensor.name, _CHECKPOINT_NAMES)) for tensor in tensors]

    def block_shape(self, config: ModelConfig, layer: int) -> BlockShape:
        shape = super().block_shape(config, layer)
        return replace(shape, vectors=shape.vectors + config.experts)
