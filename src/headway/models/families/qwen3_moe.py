"""Qwen3-MoE: Qwen3's attention; experts instead of the MLP in all layers except `dense_layers`."""

from typing import Any

from headway.models.config import ModelConfig
from headway.models.family import CheckpointTensor, Family, split_experts


class Qwen3Moe(Family):
    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    chat_format = "qwen3"
    qk_norm = True

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        step = hf.get("decoder_sparse_step", 1)
        dense = set(hf.get("mlp_only_layers") or ())
        dense |= {layer for layer in range(hf["num_hidden_layers"]) if (layer + 1) % step}
        return super().fields_from_hf(hf) | {
            "experts": hf["num_local_experts"] if "num_local_experts" in hf else hf["num_experts"],
            "experts_per_token": hf["num_experts_per_tok"],
            "expert_width": hf["moe_intermediate_size"],
            "normalize_gates": bool(hf.get("norm_topk_prob", False)),
            "dense_layers": tuple(sorted(dense)),
        }

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        return super().fields_to_hf(config) | {
            "num_experts": config.experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_width,
            "norm_topk_prob": config.normalize_gates,
            "mlp_only_layers": list(config.dense_layers),
            "decoder_sparse_step": 1,
        }

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        return split_experts(parameter, config) or [CheckpointTensor(parameter)]
