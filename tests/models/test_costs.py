"""Weights, FLOPs and bytes that are computed from a config are those of the model that is built from it."""

from typing import Any

import pytest
from models_common import small

from headway.config.shared import LoraSettings
from headway.models.adapters.lora import apply_lora
from headway.models.build import build_model
from headway.models.costs import (
    StepFlops,
    active_parameter_count,
    adapter_count,
    kv_bytes_per_token,
    parameter_count,
)

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"tied": True}),
    ("qwen3_moe", {"layers": 3, "dense_layers": (1,)}),
]


@pytest.mark.parametrize(("family", "changes"), SHAPES)
def test_weights_are_those_of_the_model(family: str, changes: dict[str, Any]) -> None:
    config = small(family, **changes)
    model = build_model(config, device="meta")
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
    experts = sum(p.numel() for p in model.layers.parameters() if p.ndim == 3)
    used = experts * config.experts_per_token // config.experts if config.experts else 0
    assert active_parameter_count(config) == matrices + used
    lora = LoraSettings(rank=4)
    apply_lora(model, lora)
    assert adapter_count(config, lora) == sum(p.numel() for name, p in model.named_parameters() if "lora" in name)
    assert kv_bytes_per_token(config, 2) == 2 * 2 * config.layers * config.kv_heads * config.head_dim


def test_a_step_counts_every_weight_six_times_a_frozen_one_four_times_and_half_of_all_pairs() -> None:
    config = small("qwen3")
    active, head = active_parameter_count(config), config.vocab_size * config.width
    pairs = 3 * 4 * config.layers * config.heads * config.head_dim * (10 * 10 + 6 * 6) / 2
    assert StepFlops(config).count([10, 6], 5) == 6 * active * 16 + 6 * head * 5 + pairs
    assert StepFlops(config, frozen=True).count([10, 6], 5) == 4 * active * 16 + 4 * head * 5 + pairs
