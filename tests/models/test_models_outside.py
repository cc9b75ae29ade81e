"""What is done to a model from outside: activation checkpointing, sharding over ranks, precision."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models_common import packed_logits, random_model, random_tokens, run_packed, small
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from headway.config.shared import LoraSettings
from headway.models.adapters.lora import adapter_tensors, apply_lora
from headway.models.build import build_model
from headway.models.checkpoints.folders import load_model, save_checkpoint
from headway.models.checkpoints.tensors import hf_tensors, load_hf_tensors
from headway.models.decoder import DecoderLM

LENGTHS = [9, 14]
FAMILIES = ["llama", "qwen3", "qwen3_moe"]


def gradients(model: DecoderLM, **extra: Any) -> dict[str, torch.Tensor]:
    ids = random_tokens(model.config, LENGTHS)
    packed_logits(model, ids, LENGTHS, **extra).logsumexp(-1).sum().backward()
    return {
        n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_give_the_same_gradients_to_the_bit(family: str) -> None:
    plain, recomputed = random_model(small(family)), random_model(small(family))
    for index, layer in enumerate(recomputed.layers):
        recomputed.layers[index] = checkpoint_wrapper(layer)
    expected, found = gradients(plain), gradients(recomputed)
    assert expected.keys() == found.keys() and len(found) > 10
    assert all(torch.equal(expected[name], found[name]) for name in found)


def test_mlps_are_compiled_once_whatever_the_samples() -> None:
    from torch._dynamo.testing import CompileCounter

    plain, compiled = random_model(small("qwen3", layers=4)), random_model(small("qwen3", layers=4))
    counter = CompileCounter()
    for layer in compiled.layers:
        layer.mlp.compile(backend=counter, dynamic=True)
    graphs = []
    for lengths in ([9, 14], [20, 3, 5], [31], [7, 7, 7, 2]):
        ids = random_tokens(plain.config, lengths)
        torch.testing.assert_close(packed_logits(compiled, ids, lengths), packed_logits(plain, ids, lengths))
        graphs.append(counter.frame_count)
    assert 0 < graphs[0] == graphs[-1] < 8, "neither another layer nor other samples may mean another compilation"


def test_training_is_deterministic() -> None:
    first, second = gradients(random_model(small("qwen3_moe"))), gradients(random_model(small("qwen3_moe")))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_serving_first_does_not_spoil_training() -> None:
    """Tables made under inference mode must not be inference tensors."""
    model = random_model(small("qwen3"))
    with torch.inference_mode():
        packed_logits(model, random_tokens(model.config, LENGTHS), LENGTHS)
    assert gradients(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_close_to_float32(family: str) -> None:
    config = small(family, initializer_range=0.05)
    full, half = random_model(config), random_model(config).bfloat16()
    ids = random_tokens(config, LENGTHS)
    with torch.no_grad():
        chosen = run_packed(full, ids, LENGTHS).routed_experts_TLk
        expected = packed_logits(full, ids, LENGTHS)
        found = packed_logits(half, ids, LENGTHS, routed_experts_TLk=chosen)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def _check_sharded(rank: int, family: str, folder: Path) -> None:
    source = random_model(small(family), seed=7)
    model = build_model(small(family), seed=1)
    apply_lora(model, LoraSettings(rank=4), seed=3)
    expected_adapter = dict(adapter_tensors(model))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    load_hf_tensors(model, hf_tensors(source))
    for (name, ours), (other, theirs) in zip(hf_tensors(source), hf_tensors(model), strict=True):
        assert name == other and torch.equal(ours, theirs), name
    for name, tensor in adapter_tensors(model):
        assert torch.equal(tensor, expected_adapter[name])
    ids = random_tokens(source.config, LENGTHS)
    with torch.no_grad():
        torch.testing.assert_close(
            run_packed(model, ids, LENGTHS).hidden_TD, run_packed(source, ids, LENGTHS).hidden_TD
        )
    save_checkpoint(model, folder, write=rank == 0)
    dist.barrier()
    for ours, theirs in zip(source.parameters(), load_model(folder).parameters(), strict=True):
        assert torch.equal(ours, theirs)


def _rank(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    # They meet by a file: a port that was free may be taken by the time they are there.
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    try:
        for family in ("qwen3", "qwen3_moe"):
            _check_sharded(rank, family, folder / family)
    finally:
        dist.destroy_process_group()


def test_sharded_models_load_and_save_the_same_tensors(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_rank, args=(rank, 2, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
