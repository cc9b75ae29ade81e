"""Formulas for known GPUs beside what was measured on one, and splits that fit."""

import json
from pathlib import Path

import pytest

from headway.base.errors import UsageError
from headway.base.gpus import GPUS
from headway.config.rl import RlSettings
from headway.models.configs.config import ModelConfig
from headway.models.costs import StepFlops
from headway.models.registry import config_from_hf
from headway.plan.gpus import find_gpu, gpu_speeds, rank_memory
from headway.plan.splits import Split, gpu_splits

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_h200.json"
LENGTHS = {"16k": 16_384, "64k": 65_536}


def qwen3(width: int, layers: int, heads: int, mlp_width: int) -> ModelConfig:
    return ModelConfig(
        "qwen3", 151_936, width, layers, heads, 8, 128, mlp_width, rope_theta=1e6, tied=True, max_len=65_536
    )


MODELS = {"qwen3-0.6b": qwen3(1024, 28, 16, 3072), "qwen3-4b": qwen3(2560, 36, 32, 9728)}


def settings_of(**changed: object) -> RlSettings:
    return RlSettings.model_validate({"model": {"dtype": "bfloat16"}, **changed})


def measured(name: str) -> float:
    rows = {row["name"]: row["ours"] for row in json.loads(RESULTS.read_text())["rows"]}
    return float(rows[name].replace(",", ""))


@pytest.mark.parametrize(
    ("model", "kind", "length"),
    [
        ("qwen3-0.6b", "full", "16k"),
        ("qwen3-0.6b", "full", "64k"),
        ("qwen3-4b", "lora", "16k"),
        ("qwen3-4b", "lora", "64k"),
    ],
)  # fmt: skip
def test_training_is_predicted_as_it_was_measured_on_an_h200(model: str, kind: str, length: str) -> None:
    tokens = LENGTHS[length]
    model_settings = {"dtype": "bfloat16", "lora": {"rank": 16} if kind == "lora" else None}
    speeds = gpu_speeds(settings_of(model=model_settings, seq_len=tokens), MODELS[model], GPUS["H200"])
    seconds = speeds.trainer.step_seconds([tokens])
    assert tokens / seconds == pytest.approx(measured(f"trainer {model} rl {kind} {length}: tokens/s"), rel=0.2)


@pytest.mark.parametrize(
    ("model", "sequences"), [("qwen3-0.6b", 256), ("qwen3-4b", 256), ("qwen3-0.6b", 1024)]
)  # fmt: skip
def test_decoding_is_predicted_as_it_was_measured_on_an_h200(model: str, sequences: int) -> None:
    engine = gpu_speeds(settings_of(), MODELS[model], GPUS["H200"]).engine
    # Prompts of 128 tokens and half of 512 sampled ones.
    step = engine.step_seconds(sequences, sequences * (128 + 256))
    assert 1e3 * step == pytest.approx(measured(f"engine {model}, {sequences} sequences: ms a step"), rel=0.2)


def test_experts_are_read_as_tokens_choose_them_and_ranks_share_the_work() -> None:
    air = {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1, "attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5,
        "rope_theta": 1e6, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "eos_token_id": 151329,
    }  # fmt: skip
    config = config_from_hf(air)
    options = {
        "seq_len": 16_384,
        "inference": {"engine": "vllm", "vllm": {"tensor_parallel_size": 4}},
        "trainer": {"parallel": {"expert": 8}, "activations": {"checkpoint": "selective"}},
    }
    h200 = GPUS["H200"]
    splits = gpu_splits(settings_of(**options, placement={"trainer_ranks": 8}), config, h200, 128)
    assert splits and all(split.devices <= 128 and split.trainer_ranks % 8 == 0 for split in splits)
    # 16 bytes for each of 107 billion weights do not fit eight GPUs.
    assert min(split.trainer_ranks for split in splits) > 8
    small, large = (settings_of(**options, placement={"trainer_ranks": ranks}) for ranks in (32, 64))
    lengths = [16_384] * 64
    seconds = [gpu_speeds(one, config, h200).trainer.step_seconds(lengths) for one in (small, large)]
    assert seconds[1] < seconds[0]
    engine = gpu_speeds(small, config, h200).engine
    alone, many, all_ = (engine.step_seconds(count, 0) for count in (1, 16, 512))
    assert alone < many < all_ < 30 * alone
    memory = rank_memory(small, config, h200)
    assert memory.engine.parts["weights"] == pytest.approx(2 * 107e9 / 4, rel=0.02)


def test_what_does_not_fit_is_said_with_a_remedy() -> None:
    with pytest.raises(UsageError, match=r"known are H200, H100.*RTX 4090"):
        find_gpu("h2000")
    assert find_gpu("nvidia rtx-4090")[0] == "RTX 4090" and find_gpu("gh200")[0] == "GH200"
    config = MODELS["qwen3-4b"]
    with pytest.raises(
        UsageError, match=r"no split of 2 GPUs fits: a trainer rank needs .*: set trainer.optimizer_on_cpu"
    ):
        gpu_splits(settings_of(), config, GPUS["RTX 4090"], 2)
    assert Split(1, 1) in gpu_splits(settings_of(seq_len=4096), config, GPUS["H200"], 2)


def test_more_flops_are_never_slower() -> None:
    config = MODELS["qwen3-4b"]
    slow, fast = (gpu_speeds(settings_of(), config, GPUS[name]) for name in ("A100", "B200"))
    lengths = [2048] * 8
    assert fast.trainer.step_seconds(lengths) < slow.trainer.step_seconds(lengths)
    assert fast.engine.step_seconds(64, 10_000) < slow.engine.step_seconds(64, 10_000)
    assert StepFlops(config).count(lengths, sum(lengths)) > 0
