"""Layers whose parameters are of a higher precision than their input: casts inside, gradients in the parameters'."""

from collections.abc import Callable

import pytest
import torch
from models_common import small
from torch import Tensor, nn

from headway.models.attention import PackedPlan
from headway.models.layers.context import ForwardContext
from headway.models.layers.experts import SparseMlp
from headway.models.layers.linear import FusedProjections, Linear
from headway.models.layers.norm import RMSNorm


def filled(module: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) * 0.3
    return module


def adapted(linear: Linear) -> Linear:
    linear.lora_A, linear.lora_B = (nn.Parameter(torch.empty(2, n)) for n in reversed(linear.weight.shape))
    return linear


def frozen(linear: Linear) -> Linear:
    linear.weight.requires_grad_(False)
    return linear


def rows(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).bfloat16()


CASES: dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]] = {
    "norm": (RMSNorm(16, 1e-6), lambda m, x: m(x)),
    "norm of a sum": (RMSNorm(16, 1e-6), lambda m, x: torch.cat(m.add_and_norm(x, x))),
    "linear": (Linear(16, 5), lambda m, x: m(x)),
    "linear with a bias": (Linear(16, 5, bias=True), lambda m, x: m(x)),
    "gradients alone": (Linear(16, 5), lambda m, x: m.grad_only(x)),
    "adapter": (adapted(Linear(16, 5)), lambda m, x: m(x, 0.5)),
    "adapter beside a frozen weight": (adapted(frozen(Linear(16, 5))), lambda m, x: m(x, 0.5)),
    "adapters by token": (adapted(Linear(16, 5)), lambda m, x: m(x, torch.full((7, 2), 0.5))),
    "projections": (
        nn.ModuleList([Linear(16, 5), Linear(16, 3)]),
        lambda m, x: torch.cat(list(FusedProjections(*m)(x)), 1),
    ),
    "experts": (SparseMlp(small("qwen3_moe", width=16)), lambda m, x: m(x, ForwardContext(PackedPlan([7]), []))[0]),
}


def test_a_norm_computes_with_its_weight_as_it_is_sent_whose_gradient_is_not_rounded() -> None:
    norm, rounded, x = filled(RMSNorm(16, 1e-6)), filled(RMSNorm(16, 1e-6)), rows(7, 16)
    assert isinstance(norm, RMSNorm)
    norm.compute_dtype = torch.bfloat16
    rounded.weight.data = rounded.weight.data.bfloat16().float()
    assert not torch.equal(norm.weight, rounded.weight)
    outs = [module(x) for module in (norm, rounded)]
    for out in outs:
        out.sum().backward()
    assert torch.equal(*outs)
    assert norm.weight.grad is not None and norm.weight.grad.dtype is torch.float32
    assert torch.equal(norm.weight.grad, rounded.weight.grad)


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_cast_where_they_are_used(name: str) -> None:
    module, run = CASES[name]
    filled(module)
    x = rows(7, 16).requires_grad_()
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    out = run(module, x)
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out.float().sum(), leaves)
    assert [g.dtype for g in found] == [leaf.dtype for leaf in leaves]
    wide = x.detach().float().requires_grad_()
    expected = torch.autograd.grad(run(module, wide).sum(), [wide, *leaves[1:]])
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.float() - theirs).norm() < 0.05 * theirs.norm() + 1e-3
