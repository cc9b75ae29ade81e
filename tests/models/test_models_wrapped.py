"""Checkpoints of Qwen3.5 with a vision tower: the text model is read from them and written back under their names."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.models.attention import PackedPlan
from headway.models.checkpoints.folders import load_model, read_tensors, save_checkpoint
from headway.models.decoder import DecoderLM
from headway.models.packed import PackedTokens

TEXT = {
    "vocab_size": 67, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
DENSE = {"intermediate_size": 80}
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
MODELS = pytest.mark.parametrize(("model_type", "mlp"), [("qwen3_5", DENSE), ("qwen3_5_moe", EXPERTS)])


def make_wrapped(model_type: str, mlp: dict[str, int], folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(model_type, text_config=TEXT | mlp, vision_config=VISION)
    config.text_config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    model.save_pretrained(folder)
    return model


def logits(model: DecoderLM, ids: torch.Tensor) -> torch.Tensor:
    plan = PackedPlan([len(ids)])
    with torch.no_grad():
        return model.logits(model(PackedTokens(ids, plan.positions, plan)).hidden_TD)


@MODELS
def test_the_text_model_is_read_and_the_rest_left_out_with_a_word(
    model_type: str, mlp: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, ids = make_wrapped(model_type, mlp, tmp_path / "theirs"), torch.arange(30)
    with caplog.at_level(logging.INFO):
        ours = load_model(tmp_path / "theirs")
    assert [record.message for record in caplog.records if "model.visual." in record.message]
    with torch.no_grad():
        torch.testing.assert_close(logits(ours, ids), theirs(ids[None]).logits[0], atol=1e-5, rtol=0)
    save_checkpoint(ours, tmp_path / "ours")
    before, after = (dict(read_tensors(tmp_path / folder)) for folder in ("theirs", "ours"))
    assert after.keys() == {name for name in before if not name.startswith("model.visual.")}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert torch.equal(logits(load_model(tmp_path / "ours"), ids), logits(ours, ids))


def test_experts_that_are_stacked_in_the_checkpoint_are_read(tmp_path: Path) -> None:
    make_wrapped("qwen3_5_moe", EXPERTS, tmp_path)
    expected, path = logits(load_model(tmp_path), torch.arange(9)), tmp_path / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        prefix = f"model.language_model.layers.{layer}.mlp.experts"
        taken = [{n: tensors.pop(f"{prefix}.{e}.{n}_proj.weight") for n in ("gate", "up", "down")} for e in range(6)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat((each["gate"], each["up"])) for each in taken])
        tensors[f"{prefix}.down_proj"] = torch.stack([each["down"] for each in taken])
    save_file(tensors, path)
    assert torch.equal(logits(load_model(tmp_path), torch.arange(9)), expected)
