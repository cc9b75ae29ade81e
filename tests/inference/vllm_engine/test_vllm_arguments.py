"""Our settings as arguments of vLLM."""

import os
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import TIED, make

from headway.base.errors import UsageError
from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import LoraSettings, ModelSettings
from headway.inference.vllm import processes
from headway.inference.vllm.arguments import arguments, check_arguments, eos_of
from headway.inference.vllm.processes import vllm_environment
from headway.models.checkpoints.folders import save_checkpoint

GB = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts") / "model"
    save_checkpoint(make(TIED, 0), folder)
    return folder


def serve_settings(**inference: Any) -> ServeSettings:
    return ServeSettings(inference=InferenceSettings(**inference), seq_len=4096)


def test_cpu_arguments_are_safe_for_seeds_and_sized_to_the_model(folder: Path) -> None:
    chosen = arguments(serve_settings(max_running=8, max_batched_tokens=64), folder, "cpu", memory=GB)
    assert chosen["dtype"] == "float32" and chosen["enforce_eager"] and not chosen["enable_chunked_prefill"]
    assert chosen["max_model_len"] == 512 == chosen["max_num_batched_tokens"]
    per_token = 2 * TIED.layers * TIED.kv_heads * TIED.head_dim * 4
    assert chosen["kv_cache_memory_bytes"] == (8 * 512 + 128) * per_token
    assert arguments(serve_settings(), folder, "cpu", memory=1000)["kv_cache_memory_bytes"] == 1000


def test_recurrent_models_on_cpus_get_room_for_states_and_no_prefix_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "hidden_size": 32, "mamba_num_heads": 4}')
    chosen = arguments(serve_settings(), tmp_path, "cpu", memory=4 * GB)
    assert not chosen["enable_prefix_caching"] and chosen["kv_cache_memory_bytes"] == 2**30
    assert arguments(serve_settings(), tmp_path, "cuda", memory=4 * GB)["enable_prefix_caching"]


def test_models_that_see_take_images_where_there_is_a_processor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {}, "text_config": {"num_hidden_layers": 2}}')
    texts = arguments(serve_settings(), tmp_path, "cuda", memory=GB)
    assert (texts["limit_mm_per_prompt"], texts["skip_tokenizer_init"]) == ({"image": 0, "video": 0}, True)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    sees = arguments(serve_settings(), tmp_path, "cuda", memory=GB)
    assert (sees["limit_mm_per_prompt"], sees["skip_tokenizer_init"]) == ({"image": 64, "video": 0}, False)
    fewer = arguments(serve_settings(vllm={"limit_mm_per_prompt": {"image": 2}}), tmp_path, "cuda", memory=GB)
    assert fewer["limit_mm_per_prompt"] == {"image": 2}


def test_gpu_arguments_leave_memory_and_chunks_to_vllm(folder: Path) -> None:
    chosen = arguments(serve_settings(), folder, "cuda", memory=GB)
    assert chosen["dtype"] == "bfloat16"
    left = {"enforce_eager", "enable_chunked_prefill", "kv_cache_memory_bytes", "max_num_batched_tokens"}
    assert not left & chosen.keys() and "limit_mm_per_prompt" not in chosen
    assert arguments(serve_settings(max_batched_tokens=999), folder, "cuda", GB)["max_num_batched_tokens"] == 999
    assert chosen["hf_overrides"] == {"head_dtype": "float32"} and "gpu_memory_utilization" not in chosen
    shared = arguments(serve_settings(kv_memory_gb=2), folder, "cuda", memory=8 * GB)
    assert (shared["kv_cache_memory_bytes"], shared["gpu_memory_utilization"]) == (2 * GB, 0.25)


def test_fp8_is_asked_of_vllm_on_gpus_alone(folder: Path) -> None:
    assert "quantization" not in arguments(serve_settings(), folder, "cuda", memory=GB)
    assert arguments(serve_settings(compute="fp8"), folder, "cuda", memory=GB)["quantization"] == "fp8_per_block"
    with pytest.raises(UsageError, match=r"FP8 on CPUs.*--inference.compute dtype"):
        arguments(serve_settings(compute="fp8"), folder, "cpu", memory=GB)


def test_an_fp8_cache_is_asked_of_vllm_on_gpus_alone(folder: Path) -> None:
    assert "kv_cache_dtype" not in arguments(serve_settings(), folder, "cuda", memory=GB)
    assert arguments(serve_settings(kv_dtype="fp8"), folder, "cuda", memory=GB)["kv_cache_dtype"] == "fp8"
    with pytest.raises(UsageError, match=r"FP8 cache on CPUs.*--inference.kv_dtype auto"):
        arguments(serve_settings(kv_dtype="fp8"), folder, "cpu", memory=GB)


def test_processes_on_a_gpu_compute_float32_in_float32_and_do_without_what_is_not_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "find_spec", lambda name: None)
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    for dtype, precision in (("float32", "ieee"), ("bfloat16", None)):
        with vllm_environment({"dtype": dtype}, "cuda", threads=None):
            assert os.environ.get("TRITON_F32_DEFAULT") == precision
            assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "TRITON_F32_DEFAULT" not in os.environ


def test_what_is_named_for_vllm_wins(folder: Path) -> None:
    settings = serve_settings(vllm={"max_num_seqs": 3, "enable_chunked_prefill": True, "seed": 5})
    chosen = arguments(settings, folder, "cpu", memory=GB)
    assert (chosen["max_num_seqs"], chosen["enable_chunked_prefill"], chosen["seed"]) == (3, True, 5)


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (4, 8), (16, 16), (33, 64)])
def test_adapters_get_room_for_their_rank(folder: Path, rank: int, room: int) -> None:
    settings = ServeSettings(model=ModelSettings(lora=LoraSettings(rank=rank)))
    chosen = arguments(settings, folder, "cpu", memory=GB)
    assert chosen["enable_lora"] and chosen["max_lora_rank"] == room


def test_adapters_in_float32_are_refused_on_gpus(folder: Path) -> None:
    settings = ServeSettings(model=ModelSettings(lora=LoraSettings(rank=4), dtype="float32"))
    with pytest.raises(UsageError, match=r"use --model\.dtype bfloat16"):
        arguments(settings, folder, "cuda", memory=GB)


def test_unknown_arguments_are_refused_with_the_nearest_name() -> None:
    known = ["max_num_seqs", "model", "dtype"]
    check_arguments({"max_num_seqs": 3}, known)
    with pytest.raises(UsageError, match=r"inference\.vllm\.max_num_seq: .*did you mean max_num_seqs\?"):
        check_arguments({"max_num_seq": 3}, known)
    with pytest.raises(UsageError, match=r"inference\.vllm\.model cannot be set"):
        check_arguments({"model": "x"}, known)
    with pytest.raises(UsageError, match=r"no such argument$"):
        check_arguments({"zzz": 1}, known)


def test_the_ids_that_end_a_sequence_are_the_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert eos_of(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert eos_of(tmp_path) == (7, 9)
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    (tmp_path / "generation_config.json").unlink()
    assert eos_of(tmp_path) == ()
