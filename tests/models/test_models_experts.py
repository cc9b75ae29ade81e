"""Routing, replay of given choices, load statistics, and grouped products against plain ones."""

from pathlib import Path

import pytest
import torch
from models_common import random_model, random_tokens, run_packed, small
from torch.nn import functional as F

from headway.base.errors import UsageError
from headway.models import ops
from headway.models.attention import PackedPlan
from headway.models.checkpoints.folders import load_model, save_checkpoint
from headway.models.checkpoints.tensors import float32_tensors
from headway.models.layers.context import ForwardContext
from headway.models.layers.experts import (
    Experts,
    LocalDispatcher,
    SigmoidGatedMlp,
    SparseMlp,
    expert_linear,
)
from headway.models.layers.mlp import GatedMlp
from headway.models.layers.router import ExpertRouter
from headway.models.ops.experts import trained as trained_experts
from headway.models.ops.experts.form import ClampedSwiglu
from headway.models.registry import find_family

LENGTHS = [9, 14]


def test_replaying_the_free_choices_gives_the_same_output_to_the_bit() -> None:
    model = random_model(small("qwen3_moe", layers=3))
    ids = random_tokens(model.config, LENGTHS)
    with torch.no_grad():
        free = run_packed(model, ids, LENGTHS)
        assert free.routed_experts_TLk is not None
        replayed = run_packed(model, ids, LENGTHS, routed_experts_TLk=free.routed_experts_TLk.to(torch.int16))
    assert torch.equal(free.hidden_TD, replayed.hidden_TD)
    assert torch.equal(free.routed_experts_TLk, replayed.routed_experts_TLk)


def test_given_choices_are_used_and_reported_and_minus_one_is_free() -> None:
    model = random_model(small("qwen3_moe"))
    ids = random_tokens(model.config, LENGTHS)
    with torch.no_grad():
        free = run_packed(model, ids, LENGTHS)
        assert free.routed_experts_TLk is not None
        given = torch.full_like(free.routed_experts_TLk, -1)
        given[3:6] = (free.routed_experts_TLk[3:6] + 1) % model.config.experts
        mixed = run_packed(model, ids, LENGTHS, routed_experts_TLk=given)
    assert mixed.routed_experts_TLk is not None
    assert torch.equal(mixed.routed_experts_TLk[3:6], given[3:6])
    # Tokens before the first given one, and those of the other sample, cannot know of it.
    assert torch.equal(mixed.hidden_TD[:3], free.hidden_TD[:3])
    assert torch.equal(mixed.hidden_TD[9:], free.hidden_TD[9:])
    assert not torch.equal(mixed.hidden_TD[3:6], free.hidden_TD[3:6])


def test_load_counts_every_choice_and_dense_layers_have_none() -> None:
    model = random_model(small("qwen3_moe", layers=3, dense_layers=(1,)))
    output = run_packed(model, random_tokens(model.config, LENGTHS), LENGTHS)
    experts, load = output.routed_experts_TLk, output.expert_load_LE
    assert experts is not None and load is not None
    assert experts.shape == (sum(LENGTHS), 3, 2) and load.shape == (3, 5)
    assert (experts[:, 1] == -1).all() and load[1].sum() == 0
    for layer in (0, 2):
        assert torch.equal(load[layer], torch.bincount(experts[:, layer].flatten(), minlength=5))
        assert (experts[:, layer, 0] != experts[:, layer, 1]).all()


@pytest.mark.parametrize("normalize", [True, False])
def test_a_layer_equals_every_expert_computed_densely(normalize: bool) -> None:
    """Replay included: gates are the live router's scores of the given experts, and it learns through them."""
    config = small("qwen3_moe", normalize_gates=normalize)
    mlp = random_model(config).layers[0].mlp
    assert isinstance(mlp, SparseMlp)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, config.width, generator=generator, requires_grad=True)
    given = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(11)])
    out, used = mlp(x, ForwardContext(PackedPlan([11]), ()), given)
    assert torch.equal(used, given)

    scores = F.softmax(x @ mlp.gate.weight.T, -1)
    gates = torch.zeros_like(scores).scatter(1, given, scores.gather(1, given))
    gates = gates / gates.sum(-1, keepdim=True) if normalize else gates
    gate, up = torch.einsum("td,eid->tei", x, mlp.experts.gate_up_proj).chunk(2, -1)
    dense = torch.einsum("tei,edi->ted", F.silu(gate) * up, mlp.experts.down_proj)
    expected = (dense * gates.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)

    probe = torch.randn(out.shape, generator=generator)
    leaves = [x, mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj]
    ours = torch.autograd.grad((out * probe).sum(), leaves, retain_graph=True)
    theirs = torch.autograd.grad((expected * probe).sum(), leaves)
    assert all(gradient.abs().sum() > 0 for gradient in ours)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_second_pass_for_gradients_alone_leaves_out_products(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradients, to the bit: two products forward and two backward; none in the second pass, and three in its
    backward one."""
    config = small("qwen3_moe", width=128, expert_width=64)
    mlp = random_model(config).layers[0].mlp
    assert isinstance(mlp, SparseMlp) and isinstance(mlp.experts, Experts)
    mlp.experts.fp8 = fp8
    counted: list[str] = []
    for name in ("grouped_linear", "fp8_grouped_matmul"):
        product = getattr(trained_experts, name)
        monkeypatch.setattr(trained_experts, name, lambda *args, f=product: counted.append("") or f(*args))
    generator = torch.Generator().manual_seed(1)
    x, probe = (torch.randn(11, config.width, generator=generator, requires_grad=True) for _ in range(2))
    context = ForwardContext(PackedPlan([11]), ())
    out, used = mlp(x, context)
    assert len(counted) == 2
    leaves = [x, *mlp.parameters()]
    whole = torch.autograd.grad(out, leaves, probe)
    assert len(counted) == 4
    again = mlp.grad_only(x, context, used)
    assert len(counted) == 4
    for a, b in zip(torch.autograd.grad(again, leaves, probe), whole, strict=True):
        assert torch.equal(a, b) and a.abs().sum() > 0
    assert len(counted) == 7


@pytest.mark.parametrize("weighted", [True, False])
def test_experts_in_fp8_have_the_gradients_of_single_operations(weighted: bool) -> None:
    """Up to rounding: rows are weighted before they are quantized or after, and a gate's gradient is a product of
    output rows in FP8, or of their gradients. With gates of 1 all others are equal."""
    generator = torch.Generator().manual_seed(2)
    shapes = (40, 128), (40, 2), (3, 256, 128), (3, 128, 128)
    x, gates, gate_up, down = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    gates = gates if weighted else torch.ones_like(gates, requires_grad=True)
    experts = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(40)])
    leaves, probe = (x, gates, gate_up, down), torch.randn(40, 128, generator=generator)
    found, expected = (
        f(x, gates, experts, gate_up, down, True) for f in (ops.routed_experts, ops.routed_experts.reference)
    )
    assert torch.equal(found, expected)
    each = (torch.autograd.grad(out, leaves, probe) for out in (found, expected))
    for name, a, b in zip(("x", "gates", "gate_up", "down"), *each, strict=True):
        tolerance = 0.05 if weighted or name == "gates" else 2e-3
        assert (a - b).norm() <= tolerance * b.norm(), f"{name}: {(a - b).norm() / b.norm()}"


def test_a_sigmoid_router_with_a_selection_bias_and_shared_experts() -> None:
    """The parts of DeepSeek-V3's layer: the bias picks experts, and neither weighs them nor gets a gradient."""
    config = small("qwen3_moe", normalize_gates=True, gate_scale=2.5)
    router = ExpertRouter(config, score="sigmoid", selection_bias=True)
    shared = GatedMlp(config.width, 12)
    mlp = SparseMlp(config, router=router, shared_experts=shared)
    generator = torch.Generator().manual_seed(1)
    for parameter in mlp.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    x = torch.randn(11, config.width, generator=generator)
    bias = mlp.get_parameter("gate.e_score_correction_bias")
    bias.data = torch.tensor([0.0, 9.0, 0.0, 9.0, 0.0])
    out, used = mlp(x, ForwardContext(PackedPlan([11]), [(x, x)]))
    assert used.sort(-1).values.tolist() == [[1, 3]] * 11

    scores = (x @ router.weight.T).sigmoid()[:, [1, 3]]
    gates = 2.5 * scores / scores.sum(-1, keepdim=True)
    gate, up = torch.einsum("td,eid->tei", x, mlp.experts.gate_up_proj[[1, 3]]).chunk(2, -1)
    routed = torch.einsum("tei,edi->ted", F.silu(gate) * up, mlp.experts.down_proj[[1, 3]])
    hidden = F.silu(x @ shared.gate_proj.weight.T) * (x @ shared.up_proj.weight.T)
    expected = (routed * gates.unsqueeze(-1)).sum(1) + hidden @ shared.down_proj.weight.T
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    out.sum().backward()
    assert bias.grad is None and router.weight.grad is not None


def test_grouped_experts_are_chosen_as_transformers_chooses_them() -> None:
    from transformers import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    groups = {"expert_groups": 4, "groups_per_token": 2}
    config = small("qwen3_moe", experts=12, experts_per_token=3, normalize_gates=True, gate_scale=1.5, **groups)
    theirs = Glm4MoeTopkRouter(
        Glm4MoeConfig(
            n_routed_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=1.5,
            hidden_size=config.width,
        )
    )  # fmt: skip
    ours = ExpertRouter(config, score="sigmoid", selection_bias=True)
    generator = torch.Generator().manual_seed(3)
    weight, bias, x = (torch.randn(n, generator=generator) for n in ((12, config.width), (12,), (40, config.width)))
    ours.load_state_dict({"weight": weight, "e_score_correction_bias": bias})
    theirs.load_state_dict({"weight": weight, "e_score_correction_bias": bias})
    gates, experts, _ = ours(x)
    _, expected, chosen = theirs(x)
    order, wanted = experts.sort(-1), chosen.sort(-1)
    assert torch.equal(order.values, wanted.values)
    torch.testing.assert_close(gates.gather(1, order.indices), expected.gather(1, wanted.indices))
    plain = ExpertRouter(small("qwen3_moe", experts=12, experts_per_token=3), score="sigmoid", selection_bias=True)
    plain.load_state_dict(ours.state_dict())
    assert not torch.equal(plain(x)[1].sort(-1).values, order.values)


@pytest.mark.parametrize("groups", [(5, 1), (2, 3), (4, 1), (6, 2)])
def test_groups_that_cannot_serve_a_token_are_refused(groups: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="groups"):
        small("qwen3_moe", experts=8, experts_per_token=3, expert_groups=groups[0], groups_per_token=groups[1])


def test_biased_and_clamped_experts_behind_a_biased_router_equal_gpt_oss() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = small("qwen3_moe", normalize_gates=True)
    reference = GptOssMLP(
        GptOssConfig(
            hidden_size=config.width, intermediate_size=config.expert_width, num_local_experts=5, num_experts_per_tok=2,
            swiglu_limit=0.8, experts_implementation="eager",
        )
    )  # fmt: skip
    ours = SparseMlp(
        config,
        router=ExpertRouter(config, bias=True),
        experts=Experts(config, activation=ClampedSwiglu(1.702, 0.8), bias=True),
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in reference.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    for (name, parameter), theirs in zip(ours.named_parameters(), reference.parameters(), strict=True):
        transposed = name in ("experts.gate_up_proj", "experts.down_proj")
        parameter.data = theirs.data.transpose(-1, -2) if transposed else theirs.data
    x = torch.randn(13, config.width, generator=generator)
    out, used = ours(x, ForwardContext(PackedPlan([13]), [(x, x)]))
    expected, _ = reference(x[None])
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-5)
    replayed = ours(x, ForwardContext(PackedPlan([13]), [(x, x)]), used)[0]
    assert torch.equal(out, replayed)


def test_biases_follow_their_experts() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.randn(n, generator=generator) for n in ((6, 4), (3, 5, 4), (3, 5)))
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    out = expert_linear(rows, weight, bias, ends)
    torch.testing.assert_close(out[:2], F.linear(rows[:2], weight[0], bias[0]))
    torch.testing.assert_close(out[2:], F.linear(rows[2:], weight[2], bias[2]))


def test_a_shared_expert_may_be_gated_by_a_sigmoid() -> None:
    config = small("qwen3_moe")
    shared = SigmoidGatedMlp(config.width, 12)
    generator = torch.Generator().manual_seed(1)
    for parameter in shared.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    x = torch.randn(7, config.width, generator=generator)
    context = ForwardContext(PackedPlan([7]), [(x, x)])
    plain = GatedMlp.forward(shared, x, context)[0]
    torch.testing.assert_close(shared(x, context)[0], plain * (x @ shared.gate.weight.T).sigmoid())


def test_dispatch_sorts_by_expert_and_combine_undoes_it() -> None:
    x = torch.arange(6.0)[:, None].expand(6, 3).contiguous()
    experts = torch.tensor([[3, 0], [0, 1], [3, 1], [1, 3], [0, 3], [1, 0]])
    dispatcher = LocalDispatcher(5)
    gates = torch.tensor([[0.25, 0.75]]).expand(6, 2)
    rows, counts, dispatched = dispatcher.dispatch(x, gates, experts)
    assert counts.tolist() == [4, 4, 0, 4, 0]
    assert rows[:, 0].tolist() == [0, 1, 4, 5, 1, 2, 3, 5, 0, 2, 3, 4]
    assert torch.equal(dispatcher.follow(x, dispatched), rows)
    assert torch.equal(dispatcher.combine(rows, dispatched), x)


@pytest.mark.parametrize("counts", [[4, 0, 3], [0, 0, 7], [2, 2, 3]])
def test_the_loop_equals_torchs_grouped_kernel(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 16, generator=generator)
    weight = torch.randn(len(counts), 8, 16, generator=generator)
    ends = torch.tensor(counts).cumsum(0).int()
    expected = torch._grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
    torch.testing.assert_close(ops.grouped_linear.reference(rows, weight, ends), expected, atol=1e-6, rtol=1e-6)


def test_the_correction_bias_stays_in_float32_in_a_model_and_a_folder_of_less(tmp_path: Path) -> None:
    """In bfloat16 two experts whose biases differ by less than its steps would look alike."""
    config = small("glm4_moe", experts=8, experts_per_token=2, expert_width=12, shared_expert_width=12, norm_eps=1e-5)
    config = find_family("glm4_moe").config_class(**vars(config))
    model = random_model(config)
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    with torch.no_grad():
        model.get_parameter(name).copy_(8 + torch.arange(8) * 1e-4)
    save_checkpoint(model, tmp_path, dtype=torch.bfloat16)
    loaded = load_model(tmp_path, dtype=torch.bfloat16)
    assert float32_tensors(loaded) == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in range(2)}
    assert torch.equal(loaded.get_parameter(name), model.get_parameter(name))
    assert loaded.get_parameter("model.layers.0.mlp.gate.weight").dtype == torch.bfloat16
