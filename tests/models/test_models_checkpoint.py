"""Checkpoints survive load, save, load to the byte; what does not fit is named."""

import json
from pathlib import Path

import pytest
import torch
from models_common import packed_logits, random_model, random_tokens, small
from safetensors.torch import load_file, save_file

from headway.base.errors import HeadwayError, UsageError
from headway.models.build import build_model
from headway.models.checkpoints.folders import load_model, read_tensors, save_checkpoint
from headway.models.checkpoints.tensors import hf_layout, hf_tensors, load_hf_tensors
from headway.models.registry import config_from_hf, config_to_hf, load_config
from headway.models.tiny import BUILT_IN

FAMILIES = ["llama", "qwen3", "qwen3_moe"]


def contents(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    return {
        name: (tensor.dtype, tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in read_tensors(folder)
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_load_save_load_is_equal_to_the_byte(
    family: str, tied: bool, dtype: torch.dtype, shard_bytes: int, tmp_path: Path
) -> None:
    save_checkpoint(random_model(small(family, tied=tied)), tmp_path / "a", dtype=dtype, shard_bytes=shard_bytes)
    save_checkpoint(load_model(tmp_path / "a", dtype=dtype), tmp_path / "b", shard_bytes=shard_bytes)
    first = contents(tmp_path / "a")
    assert first == contents(tmp_path / "b")
    assert {kind for kind, _ in first.values()} == {dtype}
    assert ("lm_head.weight" in first) is not tied
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()
    files = sorted(file.name for file in (tmp_path / "a").glob("*.safetensors"))
    assert files == sorted(file.name for file in (tmp_path / "b").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes == 20_000)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_saves_what_we_load(family: str, tmp_path: Path) -> None:
    from models_common import hf_logits, hf_model

    model = random_model(small(family))
    theirs = hf_model(model, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    again = load_model(tmp_path / "theirs")
    ids = random_tokens(model.config, [20])
    with torch.no_grad():
        torch.testing.assert_close(packed_logits(again, ids, [20]), hf_logits(theirs, ids, [20]), atol=1e-4, rtol=0)
    for (name, a), (other, b) in zip(hf_tensors(model), hf_tensors(again), strict=True):
        assert name == other and torch.equal(a, b)


def test_the_layout_is_what_the_stream_yields() -> None:
    model = random_model(small("qwen3_moe", dense_layers=(0,)))
    assert hf_layout(model) == [(name, tensor.shape) for name, tensor in hf_tensors(model)]
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in dict(hf_layout(model))
    assert "model.layers.0.mlp.up_proj.weight" in dict(hf_layout(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_load_in_any_order(family: str) -> None:
    source = random_model(small(family), seed=3)
    target = build_model(small(family), seed=None)
    load_hf_tensors(target, reversed(list(hf_tensors(source))))
    for a, b in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    save_checkpoint(random_model(small("qwen3_moe")), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.7.oddity"] = torch.ones(1)
    tensors["model.norm.weight"] = torch.ones(5)
    del tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(HeadwayError) as caught:
        load_model(tmp_path)
    message = str(caught.value)
    assert "1 missing: model.layers.1.mlp.experts.3.down_proj.weight" in message
    assert "1 extra: model.layers.7.oddity" in message
    assert "1 misshapen: model.norm.weight (5,), expected (48,)" in message


def test_a_repeated_tied_head_is_no_surprise(tmp_path: Path) -> None:
    save_checkpoint(random_model(small("llama", tied=True)), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    load_model(tmp_path)


def test_damage_is_told_apart(tmp_path: Path) -> None:
    save_checkpoint(random_model(small("llama")), tmp_path / "a", shard_bytes=20_000)
    shard = sorted((tmp_path / "a").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(HeadwayError, match="damaged"):
        load_model(tmp_path / "a")
    shard.unlink()
    with pytest.raises(HeadwayError, match=f"weight files are missing: {shard.name}"):
        load_model(tmp_path / "a")
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_config(tmp_path / "nowhere")


def test_unknown_families_list_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UsageError, match=r"'gpt2'; known: .*llama, .*qwen3, .*qwen3_moe"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "no sliding_window"),
        ({"attention_chunk_size": 8}, "would ignore attention_chunk_size = 8"),
        ({"attention_dropout": 0.1}, r"attention_dropout 0\.1 is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "beta_fast": 2.0}}, r"rope_parameters\.beta_fast"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_configs_that_would_be_computed_wrongly_are_refused(change: dict[str, object], message: str) -> None:
    hf = config_to_hf(small("qwen3")) | change
    hf = {key: value for key, value in hf.items() if value is not None}
    hf.pop("rope_parameters", None)
    with pytest.raises(UsageError, match=message):
        config_from_hf(hf)


def test_configs_survive_the_round_trip_and_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig

    for config in (
        small("llama", bos_id=1, eos_ids=(2, 5), pad_id=0, mlp_bias=True),
        small("qwen3", tied=True, rope_theta=1e6, eos_ids=(7,)),
        small("qwen3_moe", layers=4, dense_layers=(0, 2)),
    ):
        assert config_from_hf(config_to_hf(config)) == config
        (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
        theirs = AutoConfig.from_pretrained(tmp_path)
        assert config_from_hf(theirs.to_dict()) == config


def test_tokenizer_files_travel_along_and_an_old_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    (tmp_path / "a" / "leftover.bin").write_text("")
    save_checkpoint(random_model(small("llama")), tmp_path / "a", files_from=tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_building_on_the_meta_device_costs_nothing() -> None:
    model = build_model(small("qwen3_moe", width=4096, vocab_size=10**6), device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())


def test_layers_that_predict_further_tokens_are_left_out_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Multi-token prediction: a whole layer behind the last. Anything else that is not expected is an error."""
    config = BUILT_IN["tiny-glm4-moe"]
    model = random_model(config)
    further, extra = (f"model.layers.{layer}.eh_proj.weight" for layer in (config.layers, config.layers - 1))
    load_hf_tensors(model, [*hf_tensors(model), (further, torch.zeros(2))])
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("left out 1 tensors") and said.endswith(further)
    with pytest.raises(HeadwayError, match="eh_proj"):
        load_hf_tensors(model, [*hf_tensors(model), (extra, torch.zeros(2))])
