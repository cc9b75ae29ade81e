"""Layouts of large models over 8, 64 and 512 GPUs, from the formulas of `headway train --dry-run`. Nothing is run.

    python benchmarks/layouts.py

prints the table of docs/scaling.md.
"""

from collections import Counter
from typing import Any

from headway.config.trainer import TrainSettings
from headway.models.configs.config import ModelConfig
from headway.models.costs import StepFlops, parameter_count
from headway.models.registry import config_from_hf
from headway.trainer.layout_report import make_layout
from headway.trainer.memory.estimate import step_memory

TOKENS = 16_384
PEAK_FLOPS, MFU = 989e12, 0.4
NETWORK, MACHINE, GPUS_PER_MACHINE = 50e9, 450e9, 8
"""Bytes per second that leave a GPU, for another machine (a port of 400 Gbit/s each) or within one (NVLink)."""
GIB = 2**30

GLM_AIR: dict[str, Any] = {
    "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5, "rope_theta": 1e6,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 151329,
}  # fmt: skip
KIMI_K2: dict[str, Any] = {
    "model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.827, "n_group": 1, "topk_group": 1,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 50000.0, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 163585,
}  # fmt: skip
MODELS = {"GLM-4.5-Air": GLM_AIR, "Kimi-K2": KIMI_K2}
LAYOUTS = [
    ("GLM-4.5-Air", 8, True, {"expert": 8}, "full"),
    ("GLM-4.5-Air", 64, False, {"expert": 1}, "selective"),
    ("GLM-4.5-Air", 64, False, {"expert": 8}, "full"),
    ("GLM-4.5-Air", 64, False, {"expert": 8}, "selective"),
    ("GLM-4.5-Air", 512, False, {"expert": 8, "replicate": 8}, "selective"),
    ("Kimi-K2", 64, True, {"expert": 32}, "full"),
    ("Kimi-K2", 512, False, {"expert": 64}, "full"),
]
"""Model, GPUs, an adapter alone or all weights, the settings of `trainer.parallel`, and what is recomputed."""
HEADER = """\
| model | GPUs | trained | layout | recomputed | GiB per GPU | GiB sent | PFLOP | s of compute | s of network |
|---|---|---|---|---|---|---|---|---|---|"""


def settings_for(gpus: int, lora: bool, parallel: dict[str, int], recompute: str) -> TrainSettings:
    return TrainSettings.model_validate(
        {
            "seq_len": TOKENS,
            "model": {"dtype": "bfloat16", "lora": {"rank": 16, "targets": ["o_proj"]} if lora else None},
            "placement": {"trainer_ranks": gpus},
            "trainer": {"parallel": parallel, "activations": {"checkpoint": recompute}},
        }
    )


def row(model: str, gpus: int, lora: bool, parallel: dict[str, int], recompute: str) -> str:
    config = model_config(model)
    settings = settings_for(gpus, lora, parallel, recompute)
    sent: Counter[str] = Counter()
    seconds = 0.0
    for traffic in make_layout(settings, config).traffic(TOKENS):
        sent[traffic.dimension] += traffic.sent
        # Ranks of the expert dimension are neighbours, and so are all where there is one machine.
        near = gpus <= GPUS_PER_MACHINE or (traffic.dimension == "expert" and traffic.ranks <= GPUS_PER_MACHINE)
        seconds += traffic.sent / (MACHINE if near else NETWORK)
    flops = StepFlops(config, frozen=lora).count([TOKENS], TOKENS)
    cells = [
        f"{model} ({parameter_count(config) / 1e9:.0f}B)",
        str(gpus),
        "adapter" if lora else "all",
        ", ".join(f"{name} {size}" for name, size in parallel.items()),
        recompute,
        f"{step_memory(settings, config).held / GIB:.0f}",
        ", ".join(f"{name} {size / GIB:.1f}" for name, size in sent.items()),
        f"{flops / 1e15:.1f}",
        f"{flops / PEAK_FLOPS / MFU:.1f}",
        f"{seconds:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def model_config(model: str) -> ModelConfig:
    return config_from_hf(MODELS[model])


def table() -> str:
    return "\n".join([HEADER, *(row(*layout) for layout in LAYOUTS)])


if __name__ == "__main__":
    print(table())
