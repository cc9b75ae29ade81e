"""Particulars of latent and of sparse attention: names of checkpoints, layers left out, the cache, choices."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.base.errors import UsageError
from headway.config.shared import LoraSettings
from headway.models.adapters.lora import bank_of, reserve_adapters
from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.checkpoints.tensors import hf_tensors, load_hf_tensors
from headway.models.costs import StepFlops, block_shapes, kv_bytes_per_token
from headway.models.packed import IndexScores, ModelOutput, PackedTokens
from headway.models.registry import config_from_hf, config_to_hf
from headway.models.sparse_attention import choose_positions

FAMILIES = Path(__file__).parent / "families"


def read(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((FAMILIES / f"{name}.json").read_text())
    return values


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    hf = {
        **read("deepseek_v3/groups"),
        "model_type": "kimi_k2",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "mscale": 1.0}
        | {"mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0},
    }
    config = config_from_hf(hf)
    assert config.family == "deepseek_v3" and config_to_hf(config)["model_type"] == "deepseek_v3"
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("name", "value"), [("scoring_func", "softmax"), ("topk_method", "greedy"), ("num_key_value_heads", 2)]
)
def test_settings_that_would_be_ignored_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name if name != "num_key_value_heads" else "key heads"):
        config_from_hf(read("deepseek_v3/groups") | {name: value})


def test_layers_of_multi_token_prediction_are_left_out_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = build_model(config_from_hf(read("deepseek_v3/groups")))
    extra = [
        ("model.layers.3.eh_proj.weight", torch.ones(1)),
        ("model.layers.3.shared_head.norm.weight", torch.ones(1)),
    ]
    with caplog.at_level(logging.WARNING):
        load_hf_tensors(model, [*hf_tensors(model), *extra])
    assert sum("left out 2 tensors" in record.message for record in caplog.records) == 1
    with pytest.raises(Exception, match=r"extra: model\.layers\.2\.eh_proj"):
        load_hf_tensors(model, [*hf_tensors(model), ("model.layers.2.eh_proj.weight", torch.ones(1))])


def test_a_token_costs_its_compressed_row() -> None:
    assert kv_bytes_per_token(config_from_hf(read("deepseek_v3/groups")), 2) == 2 * 3 * (20 + 8)
    # Two of four layers have an indexer.
    assert kv_bytes_per_token(config_from_hf(read("glm_moe_dsa/shared")), 2) == 2 * (4 * (20 + 8) + 2 * 16)


def test_sparse_attention_costs_the_chosen_tokens_and_the_scores_of_all() -> None:
    config = config_from_hf(read("deepseek_v32/yarn"))
    flops, length = StepFlops(config), 100
    pairs = flops.count([length], 0) - length * flops.count([1], 0)
    seen, all_pairs = 9 * length - 81 / 2 - length / 2, length * length / 2 - length / 2
    expected = 2 * (3 * 2 * 4 * (20 + 14) * seen + 2 * 8 * 8 * all_pairs)
    assert pairs == pytest.approx(expected)


class LatentPlan(PackedPlan):
    """Takes what a cache would keep."""

    takes_latent_keys = True


@pytest.mark.parametrize("name", ["deepseek_v3/groups", "deepseek_v3/yarn", "glm_moe_dsa/shared"])
def test_adapters_of_several_samples_are_the_same_in_both_forms(name: str) -> None:
    """Those of `kv_b_proj`, too, which a plan with latent keys multiplies into queries and outputs."""
    config = config_from_hf(read(name))
    model, lengths = build_model(replace(config, initializer_range=0.2), seed=2), [9, 14]
    targets = sorted({target for shape in block_shapes(config) for target in shape.linears})
    reserve_adapters(model, LoraSettings(rank=2, targets=targets), slots=2)
    draw = torch.Generator().manual_seed(3)
    logits = []
    with torch.no_grad():
        for weight in (p for name, p in model.named_parameters() if ".lora_" in name):
            weight.normal_(0.0, 0.2, generator=draw)
        for slot in range(2):
            bank_of(model).set_scale(slot, 1.5 - slot)
        for plan in (PackedPlan(lengths), LatentPlan(lengths)):
            for adapters in (None, torch.tensor([0] * 9 + [1] * 14)):
                tokens = PackedTokens(torch.arange(23), plan.positions, plan, adapters_T=adapters)
                logits.append(model.logits(model(tokens).hidden_TD))
    plain, adapted, latent_plain, latent_adapted = logits
    assert (plain - adapted).abs().max() > 0.05
    torch.testing.assert_close(latent_plain, plain, atol=1e-4, rtol=0)
    torch.testing.assert_close(latent_adapted, adapted, atol=1e-4, rtol=0)


def test_chosen_positions_are_reported_and_replayed() -> None:
    config = config_from_hf(read("glm_moe_dsa/shared"))
    model, lengths = build_model(config, seed=1), [30, 3, 17]

    def run(chosen: dict[int, torch.Tensor] | None = None) -> ModelOutput:
        plan = PackedPlan(lengths)
        ids = torch.arange(50) % config.vocab_size
        with torch.no_grad():
            output: ModelOutput = model(PackedTokens(ids, plan.positions, plan, chosen_positions=chosen))
        return output

    free = run()
    assert free.chosen_positions is not None and sorted(free.chosen_positions) == [0, 2]
    first = free.chosen_positions[0]
    positions = PackedPlan(lengths).positions
    assert first.shape == (50, 6) and bool((first <= positions[:, None]).all())
    assert torch.equal((first >= 0).sum(-1), (positions + 1).clamp(max=6))
    assert torch.equal(run(dict(free.chosen_positions)).hidden_TD, free.hidden_TD)
    left = {layer: at.clone() for layer, at in free.chosen_positions.items()}
    left[0][::2] = -1
    assert torch.equal(run(left).hidden_TD, free.hidden_TD)
    latest = positions[:, None] - torch.arange(6)
    other = run({0: latest, 2: latest.where(latest >= 0, -1)})
    assert other.chosen_positions is not None and torch.equal(other.chosen_positions[0], latest)
    assert not torch.allclose(other.hidden_TD, free.hidden_TD)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0]), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(0, 9),
)
def test_of_equal_scores_the_earlier_position_is_chosen_whatever_the_padding(
    values: list[float], count: int, padding: int
) -> None:
    keys = torch.tensor([*values, *[9.0] * padding])[None, :, None]
    scores = IndexScores(torch.ones(1, 1, 1, 1), keys[0], torch.ones(1, 1, 1))
    chosen = choose_positions(scores, keys, torch.tensor([[len(values) - 1]]), count)[0, 0].tolist()
    ranked = sorted(range(len(values)), key=lambda at: (-max(values[at], 0.0), at))[:count]
    assert chosen == ranked + [-1] * (count - len(ranked))
