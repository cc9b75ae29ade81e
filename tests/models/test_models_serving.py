"""Weights laid out for serving are the same weights, also after they were swapped for new ones."""

import pytest
import torch
from models_common import packed_logits, random_model, random_tokens, small

from headway.models.checkpoints.tensors import hf_tensors, load_hf_tensors
from headway.models.decoder import DecoderLM
from headway.models.ops import registry
from headway.models.serving import StandbyWeights, fuse_projections, swap_weights

LENGTHS = [5, 9]


@torch.inference_mode()
def served(model: DecoderLM) -> torch.Tensor:
    return packed_logits(model, random_tokens(model.config, LENGTHS), LENGTHS)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"mlp_bias": True}])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_joining_changes_neither_weights_nor_what_is_computed(family: str, changes: dict[str, bool]) -> None:
    model = random_model(small(family, **changes))
    weights = {name: tensor.clone() for name, tensor in hf_tensors(model)}
    before = served(model)
    fuse_projections(model)
    assert (served(model) - before).abs().max() < 1e-5
    assert all(torch.equal(tensor, weights[name]) for name, tensor in hf_tensors(model))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "olmo2"])
def test_norms_that_are_computed_a_block_ahead_are_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._enabled, "c", False)  # an engine in this process may have enabled what sums otherwise
    model = random_model(small(family))
    with torch.no_grad():
        expected = packed_logits(model, random_tokens(model.config, LENGTHS), LENGTHS)
    assert torch.equal(served(model), expected)


def test_a_block_computes_the_next_ones_norm_with_its_last_sum() -> None:
    model = random_model(small("qwen3_moe"))
    alone = []
    for name, module in model.named_modules():
        if name.endswith((".input_layernorm", "model.norm")):
            module.register_forward_hook(lambda *_, name=name: alone.append(name))
    served(model)
    assert alone == ["model.layers.0.input_layernorm"]


def test_models_swap_their_weights_joined_or_not() -> None:
    for joined in (True, False):
        live, standby = random_model(small("qwen3"), seed=1), random_model(small("qwen3"), seed=2)
        old, new = served(live), served(standby)
        fuse_projections(live)
        if joined:
            fuse_projections(standby)
        swap_weights(live, standby)
        assert (served(live) - new).abs().max() < 1e-5 and (served(standby) - old).abs().max() < 1e-5
        swap_weights(live, standby)
        assert (served(live) - old).abs().max() < 1e-5


def test_a_joined_model_can_still_be_trained_and_moved() -> None:
    model = random_model(small("qwen3"))
    fuse_projections(model)
    packed_logits(model, random_tokens(model.config, LENGTHS), LENGTHS).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    before = served(model)
    model.to(torch.float64).to(torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert (served(model) - before).abs().max() > 1e-3


def test_weights_are_taken_over_where_they_lie_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    live = random_model(small("qwen3"), seed=1)
    fuse_projections(live)
    places = [parameter.data_ptr() for parameter in live.parameters()]
    with monkeypatch.context() as patched:
        patched.setattr(type(live.head_weight()), "is_cpu", False, raising=False)
        standby = StandbyWeights(live)
    for seed in (2, 3):
        new = random_model(small("qwen3"), seed=seed)
        load_hf_tensors(standby.model, hf_tensors(new), standby.targets)
        standby.activate()
        assert [parameter.data_ptr() for parameter in live.parameters()] == places
        assert (served(live) - served(new)).abs().max() < 1e-5
