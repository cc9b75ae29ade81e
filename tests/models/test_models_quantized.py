"""Quantized checkpoints are unpacked as they are read; what cannot be unpacked says what can."""

import json
from pathlib import Path

import pytest
import torch
from models_common import random_model, small
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.models.checkpoints.folders import SINGLE, load_model, read_tensors, save_checkpoint
from headway.models.checkpoints.quantized import unpack_fp8, unpack_mxfp4
from headway.models.checkpoints.tensors import hf_tensors, load_hf_tensors
from headway.models.registry import find_family


def set_quantization(folder: Path, values: dict[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": values}))


def test_mxfp4_is_unpacked_as_transformers_does() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 2), generator=draw, dtype=torch.uint8)
    ours = unpack_mxfp4(blocks, scales)
    assert ours.shape == (3, 64, 10) and ours.dtype == torch.bfloat16
    assert torch.equal(ours, convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize("blocks", [(4, 8), (16, 16), (3, 5), None])
def test_fp8_is_scaled_block_by_block(blocks: tuple[int, int] | None) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(10, 12, generator=draw).to(torch.float8_e4m3fn)
    rows, columns = blocks or (10, 12)
    scale = torch.rand(-(-10 // rows), -(-12 // columns), generator=draw)
    ours = unpack_fp8(weight, scale, blocks)
    for row in range(10):
        for column in range(12):
            assert ours[row, column] == weight[row, column].float() * scale[row // rows, column // columns]


def test_a_folder_in_fp8_loads_wherever_its_scales_lie(tmp_path: Path) -> None:
    """Two files, the scales of one in the other."""
    save_checkpoint(random_model(small("qwen3")), tmp_path)
    plain = load_file(tmp_path / SINGLE)
    quantized: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        if name.endswith("_proj.weight"):
            scale = 0.01 + torch.rand(-(-tensor.shape[0] // 16), -(-tensor.shape[1] // 16))
            spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[: tensor.shape[0], : tensor.shape[1]]
            quantized[name] = (tensor / spread).to(torch.float8_e4m3fn)
            scales[f"{name}_scale_inv"] = scale
            plain[name] = quantized[name].float() * spread
        else:
            quantized[name] = tensor
    (tmp_path / SINGLE).unlink()
    save_file(quantized, tmp_path / "b.safetensors")
    save_file(scales, tmp_path / "a.safetensors")
    places = dict.fromkeys(quantized, "b.safetensors") | dict.fromkeys(scales, "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    set_quantization(tmp_path, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    loaded = dict(hf_tensors(load_model(tmp_path)))
    assert loaded.keys() == plain.keys()
    assert all(torch.equal(loaded[name], plain[name]) for name in plain)

    del scales["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(scales, tmp_path / "a.safetensors")
    with pytest.raises(HeadwayError, match=r"lack their other half: model\.layers\.0\.mlp\.up_proj"):
        load_model(tmp_path)


def test_a_folder_in_mxfp4_loads_as_transformers_unpacks_it(tmp_path: Path) -> None:
    """As GPT-OSS is published: blocks and scales of experts beside plain tensors."""
    shape = vars(small("qwen3_moe", width=64, expert_width=32)) | {"family": "gpt_oss", "window": 9}
    save_checkpoint(random_model(find_family("gpt_oss").config_class(**shape)), tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(115, 125, (experts, outputs, inputs // 32), generator=draw, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / SINGLE)
    set_quantization(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    loaded = dict(hf_tensors(load_model(tmp_path)))
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
        expected = unpack_mxfp4(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        assert torch.equal(loaded[name], expected.float())
    save_checkpoint(load_model(tmp_path), tmp_path / "plain", dtype=torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert torch.equal(dict(read_tensors(tmp_path / "plain"))[name], expected)


def test_another_quantization_is_refused_with_those_that_can_be_read(tmp_path: Path) -> None:
    save_checkpoint(random_model(small("qwen3")), tmp_path)
    set_quantization(tmp_path, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(HeadwayError, match=r"quantized by 'gptq'.*readable: mxfp4, and fp8"):
        list(read_tensors(tmp_path))
    with pytest.raises(HeadwayError, match="gptq"):
        load_model(tmp_path)


def test_stacked_experts_are_read_split_or_whole() -> None:
    """Some tools write each expert by itself, some all in one tensor under the model's own name."""
    model, other = random_model(small("qwen3_moe")), random_model(small("qwen3_moe"), seed=9)
    whole = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    assert any(name.endswith("experts.gate_up_proj") for name, _ in whole)
    load_hf_tensors(other, reversed(whole))
    expected = dict(hf_tensors(model))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in hf_tensors(other))
    without = [(name, tensor) for name, tensor in whole if not name.endswith("0.mlp.experts.gate_up_proj")]
    with pytest.raises(HeadwayError, match=r"10 missing: model\.layers\.0\.mlp\.experts\.0\.gate_proj"):
        load_hf_tensors(other, without)
