"""The memory that is estimated for a training step, against what steps on one H200 took."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainer_helpers import small_settings

from headway.config.rl import RlSettings
from headway.launch.memory import engine_shares
from headway.models.configs.config import ModelConfig
from headway.models.costs import image_numbers, parameter_count, tower_weights
from headway.models.tiny import BUILT_IN
from headway.models.vision.config import VisionConfig
from headway.models.vision.costs import MOST_FEATURE_BYTES, MOST_PATCHES, TowerNumbers
from headway.trainer.memory.estimate import StepMemory, step_memory

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_parts.parallel import STEPS
from gpu_parts.trainer import LARGE, ROWS, SMALL

ROOT = Path(__file__).parents[2]
GIB = 2**30
SMOLLM2 = ModelConfig("llama", 49_152, 576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp_width=1536, tied=True)
MOE = replace(SMALL, family="qwen3_moe", experts=128, experts_per_token=8, expert_width=768, normalize_gates=True)


def estimate(config: ModelConfig, seq_len: int, trainer: dict[str, Any], lora_rank: int | None = None) -> StepMemory:
    """Of a step on one micro-batch, as the benchmarks run it."""
    changes = {"model__dtype": "auto", "seq_len": seq_len, "trainer": {"optim": {"type": "adamw"}, **trainer}}
    if lora_rank:
        changes["model__lora__rank"] = lora_rank
    return step_memory(small_settings(**changes), config, accumulates=False)


def measured() -> dict[str, float]:
    """The peak of what was allocated, in GiB, by the benchmark's row."""
    rows = json.loads((ROOT / "benchmarks/results/gpu_h200.json").read_text())["rows"]
    peaks = {row["name"]: float(row["ours"]) for row in rows if row["name"].endswith(": peak GiB")}
    return {name.removeprefix("trainer ").removesuffix(": peak GiB"): peak for name, peak in peaks.items()}


def test_a_frozen_tower_has_neither_gradients_nor_moments() -> None:
    config = BUILT_IN["tiny-vl"]
    everything, tower = parameter_count(config), tower_weights(config)
    assert 0 < tower < everything
    for training, trained in (("frozen", everything - tower), ("trained", everything)):
        changes = {"model__vision_tower": training, "trainer": {"optim": {"type": "adamw"}}}
        found = step_memory(small_settings(**changes), config)
        assert (found.weights, found.optimizer) == (4 * everything, 8 * trained)
        assert trained * 4 <= found.gradients < 4 * (trained + config.vocab_size * config.width + 1)


def test_all_tokens_are_taken_for_those_of_images() -> None:
    """Their pixels are there during all of a step; what a trained tower keeps is there until its backward pass, the
    last, which has gradients of its own beside it. A model without a tower has none of this."""
    config, seq_len = BUILT_IN["tiny-vl"], 4096
    assert isinstance(config, VisionConfig)
    image, changes = image_numbers(config, "trained"), {"seq_len": seq_len, "model__dtype": "float32"}
    frozen, trained = (
        step_memory(small_settings(**changes, model__vision_tower=training), config)
        for training in ("frozen", "trained")
    )
    blind = step_memory(small_settings(**changes), replace(config, tower=replace(config.tower, channels=0)))
    assert frozen.activations - blind.activations == 4 * seq_len * image.pixels
    kept, work = 4 * seq_len * image.kept, 4 * seq_len * image.working
    assert kept <= trained.activations - frozen.activations <= kept + 2 * work
    lora = small_settings(**changes, model__vision_tower="lora", model__lora__rank=2)
    assert step_memory(lora, config).activations >= 4 * seq_len * (image.kept + image.pixels)
    assert image_numbers(BUILT_IN["tiny"]) == TowerNumbers()


def test_engines_have_room_for_images() -> None:
    settings = RlSettings.model_validate({"model": {"path": "tiny-vl", "dtype": "float32"}, "seq_len": 1024})
    parts = engine_shares(settings, BUILT_IN["tiny-vl"]).parts
    image = image_numbers(BUILT_IN["tiny-vl"])
    # Of a step's 8,192 tokens all may be images', and the tower takes as many at once: four patches each.
    assert MOST_PATCHES == 4 * 8192
    assert parts["images"] == MOST_FEATURE_BYTES + 4 * 8192 * (image.pixels + image.working)
    assert engine_shares(settings, BUILT_IN["tiny"]).parts["images"] == 0


def test_the_benchmark_measured_these_rows() -> None:
    assert set(measured()) <= set(ROWS)
    assert len(measured()) >= 6


@pytest.mark.parametrize("name", sorted(measured()))
def test_estimates_are_near_what_steps_on_an_h200_allocated(name: str) -> None:
    row = ROWS[name]
    found = estimate(row.shape, row.seq_len, row.trainer, row.lora_rank)
    assert found.allocated / GIB == pytest.approx(measured()[name], rel=0.1)


@pytest.mark.parametrize(
    ("row", "config", "held"),
    [
        ("qwen3-0.6b rl full 16k", SMALL, 12.0),
        ("qwen3-0.6b rl full 64k", SMALL, 20.1),
        ("qwen3-0.6b rl lora 16k", SMALL, 5.1),
        ("qwen3-4b rl lora 16k", LARGE, 21.3),
        ("qwen3-4b rl lora 64k", LARGE, 48.6),
    ],
)
def test_estimates_are_near_what_the_allocator_held(row: str, config: ModelConfig, held: float) -> None:
    """In GiB, at the peak of a step (docs/one_gpu.md)."""
    found = estimate(config, ROWS[row].seq_len, ROWS[row].trainer, ROWS[row].lora_rank)
    assert found.held / GIB == pytest.approx(held, rel=0.15)


def shared_gpu() -> dict[str, Any]:
    """What ranks that shared one H200 measured, by the benchmark's step."""
    found = json.loads((ROOT / "benchmarks/results/parallel_h200.json").read_text())["results"]
    return {name: found[f"parallel {name}"] for name in STEPS if f"parallel {name}" in found}


def test_ranks_that_shared_a_gpu_measured_these_steps() -> None:
    assert len(shared_gpu()) >= 6


@pytest.mark.parametrize("name", sorted(shared_gpu()))
def test_estimates_are_near_what_ranks_that_shared_a_gpu_held(name: str) -> None:
    """Over context ranks, over expert ranks, and with offloaded activations."""
    step, measured = STEPS[name], shared_gpu()[name]
    settings = step.settings("cpu")
    found = step_memory(settings, step.shape, accumulates=step.micro_batches > settings.shard_ranks)
    assert found.held / GIB == pytest.approx(max(measured["held_gib"]), rel=0.15)


def test_kept_activations_and_another_family_too() -> None:
    assert estimate(SMALL, 16_384, {}).held / GIB == pytest.approx(31.7, rel=0.15)
    assert estimate(SMOLLM2, 22_500, {}).allocated / GIB == pytest.approx(12.9, rel=0.15)


def dims(**parallel: int) -> dict[str, Any]:
    return {"activations": {"checkpoint": "selective"}, "parallel": parallel}


def parallel_step(config: ModelConfig, ranks: int, **parallel: int) -> StepMemory:
    settings = small_settings(seq_len=131_072, placement__trainer_ranks=ranks, trainer=dims(**parallel))
    return step_memory(settings, config)


def test_every_dimension_makes_its_part_smaller() -> None:
    one, context = parallel_step(SMALL, 1), parallel_step(SMALL, 4, context=4)
    assert context.weights + context.gradients + context.optimizer == 16 * parameter_count(SMALL) // 4
    assert context.activations < 0.32 * one.activations  # a quarter, and what attention exchanges
    assert parallel_step(SMALL, 4).activations == one.activations
    sharded, expert = parallel_step(MOE, 8), parallel_step(MOE, 8, expert=8)
    assert expert.weights == sharded.weights  # experts are split over ranks instead of sharded
    assert expert.working_copy < 0.4 * sharded.working_copy  # and are never gathered
    replicated = parallel_step(MOE, 8, replicate=2)
    assert replicated.weights == 2 * sharded.weights


def test_several_micro_batches_and_kept_activations_add_gradients_to_the_peak() -> None:
    settings = small_settings(seq_len=16_384)
    once, several = (step_memory(settings, SMALL, accumulates=several) for several in (False, True))
    assert several.gradients == 4 * parameter_count(SMALL)
    assert several.allocated - once.allocated == pytest.approx(4 * parameter_count(SMALL), rel=0.01)
