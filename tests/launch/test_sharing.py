"""How a GPU's memory is divided between processes that share it."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.base.errors import UsageError
from headway.config.rl import RlSettings
from headway.core.runs import RunPaths
from headway.launch.memory import GIB, engine_shares, kv_limits, trainer_shares
from headway.launch.placement import place
from headway.launch.rl import process_specs
from headway.launch.sharing import MARGIN, GpuMemory, MemoryPlan, plan_memory
from headway.models.configs.config import ModelConfig
from headway.models.costs import adapter_count, kv_bytes_per_token, parameter_count

QWEN3_600M = ModelConfig(
    "qwen3", 151_936, 1024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp_width=3072, tied=True, max_len=40_960
)
QWEN3_4B = replace(QWEN3_600M, width=2560, layers=36, heads=32, mlp_width=9728)
H200 = GpuMemory(140 * GIB, 139 * GIB)


def settings(**values: object) -> RlSettings:
    return RlSettings.model_validate(values)


def planned(run: RlSettings, config: ModelConfig = QWEN3_600M, gpus: int = 1, memory: GpuMemory = H200) -> MemoryPlan:
    names = [str(gpu) for gpu in range(gpus)]
    return plan_memory(run, config, place(run.placement, names, cores=8), dict.fromkeys(names, memory))


def test_weights_are_counted_as_the_models_have_them() -> None:
    assert parameter_count(QWEN3_600M) == pytest.approx(596e6, rel=0.01)
    assert parameter_count(QWEN3_4B) == pytest.approx(4.02e9, rel=0.01)


def test_full_training_holds_sixteen_bytes_a_weight_and_an_adapter_two() -> None:
    full = trainer_shares(settings(), QWEN3_4B).parts
    assert full["weights"] + full["gradients"] + full["optimizer"] == 16 * parameter_count(QWEN3_4B)
    lora = settings(model={"lora": {"rank": 16}})
    assert lora.model.lora is not None
    small = trainer_shares(lora, QWEN3_4B).parts
    adapter = adapter_count(QWEN3_4B, lora.model.lora)
    assert small["weights"] == 2 * parameter_count(QWEN3_4B) + 4 * adapter
    assert small["gradients"] + small["optimizer"] == 12 * adapter


def test_recomputing_and_shorter_sequences_need_less() -> None:
    def activations(checkpoint: str, seq_len: int) -> int:
        run = settings(seq_len=seq_len, trainer={"activations": {"checkpoint": checkpoint}})
        return trainer_shares(run, QWEN3_600M).parts["activations"]

    assert activations("off", 8192) > activations("selective", 8192) > activations("full", 8192)
    assert activations("off", 4096) * 2 == activations("off", 8192)


def test_an_engine_that_shares_is_told_how_much_cache_it_may_have() -> None:
    run = settings(seq_len=4096, inference={"max_running": 64})
    plan = planned(run)
    _, most = kv_limits(run.inference, QWEN3_600M, 4096, 2)
    assert plan.kv_bytes == [most]  # there is room for all that can ever be full
    assert most == 64 * 4096 * kv_bytes_per_token(QWEN3_600M, 2)
    assert "trainer ~" in plan.lines[0] and "262,144 tokens" in plan.lines[0]


def test_a_cache_in_fp8_takes_half_the_memory_and_its_scales() -> None:
    run = settings(seq_len=4096, inference={"max_running": 64, "kv_dtype": "fp8"})
    plan = planned(run)
    assert plan.kv_bytes == [64 * 4096 * kv_bytes_per_token(QWEN3_600M, 2) * (128 + 4) / (2 * 128)]
    assert "262,144 tokens" in plan.lines[0]


def test_a_cache_of_the_users_size_is_kept() -> None:
    assert planned(settings(inference={"kv_memory_gb": 2.0})).kv_bytes == [2_000_000_000]


def test_engines_with_a_gpu_of_their_own_choose_themselves() -> None:
    plan = planned(settings(), gpus=2)
    assert plan.kv_bytes == [None]
    assert plan.lines == []


def test_engines_beside_the_trainer_get_less_than_the_one_that_is_not() -> None:
    plan = planned(settings(seq_len=2048, placement={"engines": 3}), QWEN3_4B, gpus=2)
    assert plan.kv_bytes[0] == plan.kv_bytes[2] is not None
    assert plan.kv_bytes[1] is None
    assert "2 engines" in plan.lines[0]


@pytest.mark.parametrize(
    ("values", "free", "advice"),
    [
        ({}, 60, "optimizer"),
        ({"seq_len": 40_960, "trainer": {"optimizer_on_cpu": True}}, 130, "trainer.activations.checkpoint"),
        ({"model": {"lora": {}}, "inference": {"kv_memory_gb": 90.0}, "seq_len": 8192}, 80, "inference.kv_memory_gb"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_setting_to_lower(
    values: dict[str, object], free: int, advice: str
) -> None:
    with pytest.raises(UsageError, match=advice):
        planned(settings(**values), QWEN3_4B, memory=GpuMemory(140 * GIB, free * GIB))


def test_a_gpu_that_nobody_can_size_up_is_left_to_the_user() -> None:
    run = settings()
    plan = plan_memory(run, QWEN3_600M, place(run.placement, ["0"], cores=8), {})
    assert plan.kv_bytes == [None]
    assert "inference.kv_memory_gb" in plan.lines[0]


def test_every_engine_is_started_with_its_share(tmp_path: Path) -> None:
    run = settings(placement={"engines": 2})
    placement = place(run.placement, ["0"], cores=8)
    specs = process_specs(run, RunPaths(tmp_path), placement, MemoryPlan([1_500_000_000, None], []))
    shared, own = (spec.argv for spec in specs[:2])
    assert shared[shared.index("--inference.kv_memory_gb") + 1] == "1.5"
    assert "--inference.kv_memory_gb" not in own


@given(st.integers(8, 140), st.integers(1, 512), st.sampled_from([256, 2048, 16_384]), st.integers(1, 3))
def test_what_is_given_out_never_exceeds_what_is_free(free: int, running: int, seq_len: int, engines: int) -> None:
    run = settings(seq_len=seq_len, inference={"max_running": running}, placement={"engines": engines})
    memory = GpuMemory(140 * GIB, free * GIB)
    try:
        plan = planned(run, memory=memory)
    except UsageError:
        return
    taken = trainer_shares(run, QWEN3_600M).total
    taken += sum(engine_shares(run, QWEN3_600M).total + (size or 0) for size in plan.kv_bytes)
    assert taken <= memory.free - int(MARGIN * memory.total)
