"""Qwen3-MoE: Qwen3's attention; experts instead of the MLP in all layers except `dense_layers`."""

from collections.abc import Collection
from typing import Any

from headway.models.checkpoint_tensors import CheckpointTensor, split_experts
from headway.models.configs.config import ModelConfig
from headway.models.family import Family


class Qwen3Moe(Family):
    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    examples = "Qwen3-30B-A3B, Qwen3-235B-A22B"
    notes = "experts stacked; dense layers in between; router replay, as in all families with experts"
    hf_names = {
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "moe_intermediate_size",
        "normalize_gates": "norm_topk_prob",
    }
    hf_reads: Collection[str] = ("num_local_experts", "num_experts", "decoder_sparse_step", "mlp_only_layers")
    hf_fixed = {"use_sliding_window": False}
    hf_ignored = ("sliding_window", "max_window_layers")
    chat_format = "qwen3"
    qk_norm = True

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        experts = hf["num_local_experts"] if "num_local_experts" in hf else hf["num_experts"]
        fields = super().fields_from_hf({**hf, "num_experts": experts})
        step = hf.get("decoder_sparse_step", 1)
        dense = {layer for layer in range(fields["layers"]) if (layer + 1) % step}
        return fields | {"dense_layers": tuple(sorted(dense.union(hf.get("mlp_only_layers") or ())))}

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        return super().fields_to_hf(config) | {"mlp_only_layers": list(config.dense_layers), "decoder_sparse_step": 1}

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        return split_experts(parameter, config) or [CheckpointTensor(parameter)]
