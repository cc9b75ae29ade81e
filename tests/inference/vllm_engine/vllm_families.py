"""A model of each family in sizes that vLLM's CPU build takes, and how far its logprobs are from ours."""

import json
from pathlib import Path
from typing import Any

import torch
from engine_common import prompt, publish, training_logprobs
from vllm_harness import Harness

from headway.models.build import build_model
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.registry import config_from_hf

TOKENS = prompt(60)
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
"""Over those of the smallest case of each family; vLLM's attention on CPUs wants heads of 32 numbers or more."""
FAMILIES = Path(__file__).parents[2] / "models" / "families"
_EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": None,
}
_DELTA_NET = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
SERVED_SHAPES: dict[str, dict[str, Any]] = {
    "llama/plain": {},
    "llama/llama3": {},
    "mistral/window": {"sliding_window": 16},
    "qwen2/plain": {"hidden_size": 128},  # vLLM takes the size of a head from it
    "qwen2/tied_window": {"sliding_window": 16},
    "qwen3/plain": {},
    "qwen3_moe/plain": {"moe_intermediate_size": 32},
    "gemma3_text/plain": {"sliding_window": 16},
    "olmo2/plain": {},
    "olmo3/plain": {"sliding_window": 16},
    "olmo3/yarn": {"sliding_window": 16},
    "glm4_moe/plain": _EXPERTS,
    "gpt_oss/plain": {"intermediate_size": 64, "sliding_window": 16, "num_local_experts": 8},
    "minimax_m2/plain": {"intermediate_size": 32, "num_local_experts": 8},
    "afmoe/plain": {"moe_intermediate_size": 32, "sliding_window": 16},
    "laguna/plain": {"moe_intermediate_size": 32, "sliding_window": 16},
    "deepseek_v3/yarn": _LATENT,
    "deepseek_v32/yarn": {**_LATENT, "index_head_dim": 32, "index_topk": 16},
    "glm_moe_dsa/shared": {**_LATENT, "index_head_dim": 32, "index_topk": 16},
    "qwen3_next/plain": {**_DELTA_NET, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3_5_text/plain": _DELTA_NET,
    "qwen3_5_moe_text/plain": {
        **_DELTA_NET,
        "intermediate_size": None,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "nemotron_h/dense": {"mamba_head_dim": 32, "ssm_state_size": 32, "time_step_min": 1e-6},  # vLLM bounds no step
    "nemotron_h/experts": {
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
}


def config_of(case: str) -> ModelConfig:
    values = json.loads((FAMILIES / f"{case}.json").read_text())
    return config_from_hf({"bos_token_id": None, "eos_token_id": None, **values, **SIZES, **SERVED_SHAPES[case]})


def make_model(config: ModelConfig, seed: int) -> DecoderLM:
    """Random weights, large enough that every token depends visibly on every other, with norms off 1 and biases off
    0."""
    model = build_model(config, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    return model


def difference(case: str, folder: Path) -> float:
    """Serve a family by vLLM, give it new weights, and compare its logprobs with the trainer's."""
    config = config_of(case)
    harness = Harness(config, folder / "model", build=make_model)
    try:
        harness.run(harness.engine.update(publish(folder / "update", 1, make_model(config, 1))))
        expected = training_logprobs(make_model(config, 1), TOKENS)
        return float((harness.served(TOKENS) - expected).abs().max())
    finally:
        harness.close()
