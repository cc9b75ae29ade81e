"""Adapters: PEFT agrees, many in one batch equal each alone, merging changes nothing, wrong ones are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_common import hf_logits, hf_model, packed_logits, random_model, random_tokens, small
from torch import Tensor

from headway.base.errors import HeadwayError, UsageError
from headway.config.shared import LoraSettings
from headway.models.adapters.adaptable import adapters_of
from headway.models.adapters.lora import (
    adapter_tensors,
    apply_lora,
    drop_adapter,
    load_adapter,
    merge_adapter,
    reserve_adapters,
    save_adapter,
)
from headway.models.adapters.peft import read_adapter
from headway.models.build import build_model
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.layers.linear import join_adapters
from headway.models.registry import config_from_hf, find_family
from headway.models.serving import fuse_projections

SETTINGS = LoraSettings(rank=4, alpha=12.0)
LENGTHS = [7, 12]
WITH_EXPERTS = LoraSettings(rank=4, alpha=12.0, targets=["q_proj", "v_proj", "experts"])


def moe(family: str) -> ModelConfig:
    return find_family(family).config_class(**(vars(small("qwen3_moe")) | {"family": family, "window": 9}))


def randomize(model: DecoderLM, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def adapted(family: str = "qwen3", settings: LoraSettings = SETTINGS, seed: int = 5) -> DecoderLM:
    model = random_model(small(family))
    apply_lora(model, settings)
    randomize(model, seed)
    return model


def logits(model: DecoderLM, adapters: Tensor | None = None) -> Tensor:
    ids = random_tokens(model.config, LENGTHS)
    with torch.no_grad():
        return packed_logits(model, ids, LENGTHS, adapters_T=adapters)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_a_fresh_adapter_changes_nothing_and_alone_is_trained(family: str) -> None:
    model = random_model(small(family))
    before = logits(model)
    apply_lora(model, SETTINGS)
    assert torch.equal(logits(model), before)
    ids = random_tokens(model.config, LENGTHS)
    packed_logits(model, ids, LENGTHS).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        assert (parameter.grad is not None) == ("lora_" in name)
    assert all(p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "lora_B" in n and p.grad is not None)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_a_saved_adapter_loads_in_peft_with_equal_logits(family: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model = adapted(family)
    reference = hf_model(random_model(small(family)), tmp_path / "base")
    save_adapter(model, tmp_path / "adapter", SETTINGS, str(tmp_path / "base"))
    theirs = PeftModel.from_pretrained(reference, tmp_path / "adapter")
    ids = random_tokens(model.config, LENGTHS)
    with torch.no_grad():
        expected = hf_logits(theirs, ids, LENGTHS)
    assert (expected - logits(random_model(small(family)))).abs().max() > 0.1
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_travel_to_peft_and_back(family: str, tmp_path: Path) -> None:
    """PEFT has all experts of a weight in one pair of matrices; GPT-OSS stores them transposed."""
    from peft import PeftModel

    model = random_model(moe(family))
    reference = hf_model(model, tmp_path / "base")
    apply_lora(model, WITH_EXPERTS)
    randomize(model)
    save_adapter(model, tmp_path / "ours", WITH_EXPERTS, "base")
    theirs = PeftModel.from_pretrained(reference, tmp_path / "ours").eval()
    ids = random_tokens(model.config, LENGTHS)
    with torch.no_grad():
        expected = hf_logits(theirs, ids, LENGTHS)
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
    plain = random_model(moe(family))
    assert (logits(plain) - expected).abs().max() > 0.1

    theirs.save_pretrained(tmp_path / "theirs")
    settings, tensors = read_adapter(tmp_path / "theirs")
    assert sorted(settings.targets) == sorted(WITH_EXPERTS.targets)
    load_adapter(plain, 0, tensors.items(), settings)
    assert plain.adapters is not None
    plain.adapters.default = 0
    torch.testing.assert_close(logits(plain), expected, atol=1e-4, rtol=1e-4)


def test_adapters_of_experts_side_by_side_equal_each_merged() -> None:
    model = random_model(moe("gpt_oss"))
    reserve_adapters(model, WITH_EXPERTS, 2)
    alone = []
    for slot in range(2):
        one = random_model(moe("gpt_oss"))
        apply_lora(one, WITH_EXPERTS)
        randomize(one, seed=slot)
        load_adapter(model, slot, adapter_tensors(one), WITH_EXPERTS)
        merge_adapter(one)
        alone.append(logits(one))
    base = logits(random_model(moe("gpt_oss")))
    assert torch.equal(logits(model, torch.full((19,), -1)), base)
    mixed = logits(model, torch.tensor([0] * 7 + [1] * 12))
    torch.testing.assert_close(mixed[:7], alone[0][:7], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mixed[7:], alone[1][7:], atol=1e-4, rtol=1e-4)
    assert (mixed - base).abs().max() > 0.1


def test_adapters_of_experts_alone_are_trained_and_refuse_dropout() -> None:
    model = random_model(moe("qwen3_moe"))
    apply_lora(model, LoraSettings(rank=3, targets=["experts"]))
    packed_logits(model, random_tokens(model.config, LENGTHS), LENGTHS).logsumexp(-1).sum().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(".mlp.experts.lora_" in name and p.grad is not None for name, p in trained.items())
    assert len(trained) == 4 * model.config.layers
    assert all(p.grad.abs().sum() > 0 for name, p in trained.items() if name.endswith("B") and p.grad is not None)
    with pytest.raises(UsageError, match="dropout must be 0"):
        apply_lora(random_model(moe("qwen3_moe")), LoraSettings(targets=["experts"], dropout=0.1))


def test_an_adapter_made_by_peft_loads_here(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = random_model(small("llama"))
    theirs = get_peft_model(
        hf_model(base, tmp_path / "base"),
        LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    ).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    settings, tensors = read_adapter(tmp_path / "adapter")
    assert (settings.rank, settings.alpha) == (3, 5)
    load_adapter(base, 0, tensors.items(), settings)
    ids = random_tokens(base.config, LENGTHS)
    with torch.no_grad():
        expected = hf_logits(theirs, ids, LENGTHS)
    torch.testing.assert_close(logits(base, torch.zeros(sum(LENGTHS), dtype=torch.long)), expected, atol=1e-4, rtol=0)


def test_adapters_survive_save_and_load_to_the_bit(tmp_path: Path) -> None:
    model = adapted()
    save_adapter(model, tmp_path / "a", SETTINGS, "base")
    settings, tensors = read_adapter(tmp_path / "a")
    twin = random_model(small("qwen3"))
    apply_lora(twin, settings)
    load_adapter(twin, 0, tensors.items(), settings)
    assert settings == SETTINGS.model_copy(update={"targets": settings.targets})
    for (name, ours), (other, theirs) in zip(adapter_tensors(model), adapter_tensors(twin), strict=True):
        assert name == other and torch.equal(ours, theirs)


def test_an_adapter_leaves_a_bank_of_higher_rank_as_it_came(tmp_path: Path) -> None:
    narrow = LoraSettings(rank=2, alpha=3.0)
    one = adapted(settings=narrow)
    served = random_model(small("qwen3"))
    reserve_adapters(served, SETTINGS, slots=2)
    load_adapter(served, 1, adapter_tensors(one), narrow)
    save_adapter(served, tmp_path / "a", narrow, "base", slot=1)
    settings, tensors = read_adapter(tmp_path / "a")
    assert settings.rank == 2
    expected = dict(adapter_tensors(one))
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_many_adapters_in_one_batch_equal_each_alone() -> None:
    """Ranks, scales and targets differ; -1 is the base model; slots are loaded out of order, so the bank grows."""
    kinds = [
        LoraSettings(rank=4, alpha=12.0),
        LoraSettings(rank=2, alpha=1.0, targets=["q_proj"]),
        LoraSettings(rank=7, alpha=7.0, targets=["up_proj", "o_proj"]),
    ]
    served = random_model(small("qwen3"))
    base = logits(served)
    alone = []
    for slot in (1, 0, 2):
        one = adapted(settings=kinds[slot], seed=slot)
        alone.append((slot, logits(one)))
        load_adapter(served, slot, adapter_tensors(one), kinds[slot])
    first, second = LENGTHS
    for slot, expected in alone:
        mixed = logits(served, torch.tensor([slot] * first + [-1] * second))
        torch.testing.assert_close(mixed[:first], expected[:first], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mixed[first:], base[first:], atol=1e-5, rtol=1e-5)
        assert (expected[:first] - base[:first]).abs().max() > 0.01
    pair = logits(served, torch.tensor([2] * first + [0] * second))
    expected = dict(alone)
    torch.testing.assert_close(pair[:first], expected[2][:first], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pair[first:], expected[0][first:], atol=1e-5, rtol=1e-5)
    assert torch.equal(logits(served), base), "tokens without an index use the base model in serving"


def test_adapters_that_lie_beside_their_weights_compute_the_same() -> None:
    """As a server on a GPU has them; layers without an adapter stay as they are, and the bank may grow again."""
    served = random_model(small("qwen3"))
    fuse_projections(served)
    slots = torch.tensor([0] * LENGTHS[0] + [-1] * LENGTHS[1])
    for slot, settings in enumerate((SETTINGS, LoraSettings(rank=6, targets=["q_proj", "o_proj"]))):
        load_adapter(served, slot, adapter_tensors(adapted(settings=settings)), settings)
        with torch.inference_mode():
            expected, base = logits(served, slots), logits(served)
            join_adapters(served)
            attention: Any = served.layers[0].self_attn
            assert attention.o_proj.beside.whole is not None and attention.projections.beside.whole is not None
            torch.testing.assert_close(logits(served, slots), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(logits(served), base, atol=1e-5, rtol=1e-5)
            attention.o_proj.weight.mul_(0.5)
            attention.q_proj.weight.mul_(0.5)
        changed = logits(served, slots)  # outside serving passes the parameters themselves are used
        with torch.inference_mode():
            torch.testing.assert_close(logits(served, slots), changed, atol=1e-5, rtol=1e-5)


def test_several_adapters_train_at_once_each_on_its_own_tokens() -> None:
    model = random_model(small("qwen3"))
    apply_lora(model, SETTINGS, slots=2)
    randomize(model)
    ids = random_tokens(model.config, LENGTHS)
    first, second = LENGTHS
    index = torch.tensor([0] * first + [1] * second)
    packed_logits(model, ids, LENGTHS, adapters_T=index)[:first].logsumexp(-1).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert all(g[: SETTINGS.rank].abs().sum() > 0 and g[SETTINGS.rank :].abs().sum() == 0 for g in grads.values())
    assert len(grads) == 2 * 7 * model.config.layers


def test_replacing_and_dropping_an_adapter() -> None:
    served = random_model(small("qwen3"))
    base = logits(served)
    reserve_adapters(served, SETTINGS, slots=3)
    index = torch.full((sum(LENGTHS),), 1)
    for seed in (1, 2):
        one = adapted(seed=seed)
        load_adapter(served, 1, adapter_tensors(one), SETTINGS)
        torch.testing.assert_close(logits(served, index), logits(one), atol=1e-5, rtol=1e-5)
    drop_adapter(served, 1)
    torch.testing.assert_close(logits(served, index), base, atol=1e-6, rtol=0)


def test_merging_keeps_what_the_model_computes() -> None:
    model = adapted()
    before = logits(model)
    merge_adapter(model)
    assert not any("lora_" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)


def test_dropout_acts_in_training_only() -> None:
    model = adapted(settings=LoraSettings(rank=4, alpha=12.0, dropout=0.5))
    model.eval()
    assert torch.equal(logits(model), logits(model))
    model.train()
    torch.manual_seed(0)
    first = logits(model)
    assert not torch.equal(first, logits(model))
    torch.manual_seed(0)
    assert torch.equal(first, logits(model))


def test_adapters_that_do_not_fit_are_refused_and_change_nothing() -> None:
    model = adapted()
    before = logits(model)
    tensors = dict(adapter_tensors(adapted(seed=9)))
    name = next(iter(tensors))
    wrong = {
        "no place for: model.layers.9": {**tensors, "model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(1)},
        "expected \\(4, 48\\)": {**tensors, name: torch.ones(3, 48)},
        "only one of": {k: v for k, v in tensors.items() if k != name},
        "no place for: lm_head": {**tensors, "lm_head.lora_A.weight": torch.ones(4, 48)},
    }
    for message, changed in wrong.items():
        with pytest.raises(HeadwayError, match=message):
            load_adapter(model, 0, changed.items(), SETTINGS)
    assert torch.equal(logits(model), before)
    with pytest.raises(UsageError, match="nothing_proj"):
        apply_lora(random_model(small("qwen3")), LoraSettings(targets=["nothing_proj"]))


def test_adapter_variants_that_compute_something_else_are_refused(tmp_path: Path) -> None:
    save_adapter(adapted(), tmp_path / "a", SETTINGS, "base")
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(config.read_text().replace('"bias"', '"use_dora": true, "bias"'))
    with pytest.raises(HeadwayError, match="use_dora"):
        read_adapter(tmp_path / "a")
    with pytest.raises(HeadwayError, match="no adapter folder"):
        read_adapter(tmp_path / "b")


@pytest.mark.parametrize(
    ("case", "adapted"),
    [
        ("deepseek_v3/groups", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "up_proj"}),
        ("nemotron_h/dense", {"in_proj", "out_proj", "q_proj", "up_proj"}),
        ("qwen3_next/plain", {"in_proj_qkvz", "out_proj", "q_proj", "up_proj"}),
        ("qwen3_5_text/plain", {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "up_proj"}),
    ],
)
def test_the_default_reaches_latent_attention_and_recurrent_layers(case: str, adapted: set[str]) -> None:
    values = json.loads((Path(__file__).parent / "families" / f"{case}.json").read_text())
    model = build_model(config_from_hf(values))
    apply_lora(model, LoraSettings())
    assert adapted <= {weight.target for weight, _, _ in adapters_of(model)}


def test_unknown_targets_are_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"c_attn; model\.lora\.targets can be: down_proj, gate_proj, k_pr"):
        apply_lora(random_model(small("llama")), LoraSettings(targets=["c_attn"]))
