"""Weights, FLOPs and bytes that are computed from a config are those of the model that is built from it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models_common import small
from torch import Tensor, nn

from headway.config.shared import LoraSettings
from headway.core.images import Grid
from headway.models.adapters.lora import apply_lora
from headway.models.build import build_model
from headway.models.costs import (
    StepFlops,
    active_parameter_count,
    adapter_count,
    block_shapes,
    image_numbers,
    kept_numbers,
    kv_bytes_per_token,
    parameter_count,
    tower_weights,
)
from headway.models.layers.experts import Experts, SparseMlp
from headway.models.registry import config_from_hf, find_family
from headway.models.vision.config import TowerTraining, VisionConfig
from headway.models.vision.decoder import VisionLM
from headway.models.vision.tower import PatchProjection, TowerLinear

FAMILIES = Path(__file__).parent / "families"
KINDS: tuple[TowerTraining, ...] = ("lora", "trained")

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


@pytest.mark.parametrize(
    "file",
    sorted(file for file in FAMILIES.glob("*/*.json") if file.parent.name != "transformers"),
    ids=lambda file: f"{file.parent.name}-{file.stem}",
)
def test_a_family_says_if_its_experts_are_one_operation(file: Path) -> None:
    hf = json.loads(file.read_text())
    hf.pop("images", None)
    config = config_from_hf(hf)
    sparse = [module for module in build_model(config, device="meta").modules() if isinstance(module, SparseMlp)]
    plain = {isinstance(module.experts, Experts) and module.experts.plain for module in sparse}
    assert plain <= {find_family(config.family).plain_experts}


def test_experts_of_one_operation_keep_the_gate_and_what_it_gates() -> None:
    config = small("qwen3_moe", layers=1)
    (block,) = block_shapes(config)
    apart, joined = (kept_numbers(config, block, "off", joined=joined) for joined in (False, True))
    rows = 2 * config.experts_per_token * config.width
    assert apart - joined == rows + config.experts_per_token * config.expert_width


def test_a_step_counts_every_weight_six_times_a_frozen_one_four_times_and_half_of_all_pairs() -> None:
    config = small("qwen3")
    active, head = active_parameter_count(config), config.vocab_size * config.width
    pairs = 3 * 4 * config.layers * config.heads * config.head_dim * (10 * 10 + 6 * 6) / 2
    assert StepFlops(config).count([10, 6], 5) == 6 * active * 16 + 6 * head * 5 + pairs
    assert StepFlops(config, frozen=True).count([10, 6], 5) == 4 * active * 16 + 4 * head * 5 + pairs


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_work_of_a_tower_is_that_of_its_products(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward; a backward pass has a product for inputs and one for weights. Windows are cut at the image's edges."""
    hf = json.loads((Path(__file__).parent / "families" / family / "images.json").read_text())
    if "window_size" in (tower := hf["vision_config"]):  # three features, of which two may be left at an edge
        tower["window_size"] = 3 * 2 * tower["patch_size"]
    config = config_from_hf({name: value for name, value in hf.items() if name != "images"})
    model = build_model(config, seed=0)
    assert isinstance(model, VisionLM) and isinstance(config, VisionConfig)
    assert tower_weights(config) == sum(p.numel() for p in model.tower.parameters())
    grids = [config.tower.only_grid or grid for grid in (Grid(1, 4, 6), Grid(1, 10, 16))]
    patches = torch.randn(sum(grid.patches for grid in grids), config.tower.patch_numbers)
    done: list[int] = []

    def count_product(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        done.append(2 * inputs[0].numel() * output.shape[-1])

    def count_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        done.append(4 * q.numel() * k.shape[-2])
        return attend(q, k, v)

    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", count_attention)
    for module in model.tower.modules():
        if isinstance(module, TowerLinear | PatchProjection):
            module.register_forward_hook(count_product)
    with torch.no_grad():
        model.tower(patches, grids)
    text = StepFlops(config).count([60], 10)
    assert StepFlops(config).count([60], 10, grids) - text == sum(done)
    adapters, trained = (StepFlops(config, tower=kind).count([60], 10, grids) - text for kind in KINDS)
    assert 2 * sum(done) < adapters < trained == 3 * sum(done)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_what_a_tower_keeps_is_what_its_backward_pass_holds(family: str) -> None:
    """Within a tenth, in float32. A frozen tower keeps nothing."""
    hf = json.loads((Path(__file__).parent / "families" / family / "images.json").read_text())
    hf["vision_config"] |= {"hidden_size": 96, "intermediate_size": 352}
    config = config_from_hf({name: value for name, value in hf.items() if name != "images"})
    model = build_model(config, seed=0)
    assert isinstance(model, VisionLM) and isinstance(config, VisionConfig)
    grids = [config.tower.only_grid or grid for grid in (Grid(1, 16, 16), Grid(1, 8, 20))]
    patches = torch.randn(sum(grid.patches for grid in grids), config.tower.patch_numbers)
    tokens = len(patches) // config.tower.merge**2
    known = {parameter.untyped_storage().data_ptr() for parameter in (*model.parameters(), patches)}
    held: dict[int, int] = {}

    def hold(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        features = model.tower(patches, grids)
        numbers = image_numbers(config, "trained")
        assert sum(held.values()) == pytest.approx(4 * tokens * numbers.kept, rel=0.1)
        assert features.last_FD.requires_grad
        held.clear()
        model.tower.requires_grad_(False)
        model.tower(patches, grids)
    assert not held and image_numbers(config, "frozen").kept == 0
    assert numbers.pixels * tokens == patches.numel()
