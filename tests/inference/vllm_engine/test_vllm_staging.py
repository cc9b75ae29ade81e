"""Versions as the server stages them for workers."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from engine_common import publish
from vllm_families import FAMILIES
from vllm_harness import TIED, make

from headway.config.shared import FilesystemWeights, PointToPointWeights, SharedMemoryWeights, WeightTransport
from headway.core.runs import RunPaths
from headway.inference.errors import UpdateError
from headway.inference.vllm.updates.staged import StagedFile, read_staged
from headway.inference.vllm.updates.stager import INNER_TOWERS, Stager, rename, swap_sides
from headway.models.build import build_model
from headway.models.checkpoints.tensors import hf_tensors
from headway.models.registry import config_from_hf
from headway.transport.weights import make_sender


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
