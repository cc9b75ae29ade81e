"""Products with written-out gradients against autograd's."""

import pytest
import torch
from ops_common import backend
from torch import Tensor

from headway.models import ops


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + sum(size)), dtype=torch.float64)


@pytest.mark.parametrize("outputs", [(40, 24), (9, 5, 7), (3,)])
def test_adapted_layers_have_the_values_and_gradients_of_autograd(outputs: tuple[int, ...]) -> None:
    x = random(11, 8).requires_grad_()
    weights = [random(size, 8, seed=1) for size in outputs]
    downs = [random(2, 8, seed=n).requires_grad_() for n, _ in enumerate(outputs)]
    ups = [random(2, size, seed=n).requires_grad_() for n, size in enumerate(outputs)]
    probes = [random(11, size, seed=3) for size in outputs]
    leaves = [x, *downs, *ups]

    def gradients(outs: list[Tensor]) -> list[Tensor]:
        loss = torch.stack([(out * probe).sum() for out, probe in zip(outs, probes, strict=True)]).sum()
        return list(torch.autograd.grad(loss, leaves))

    expected = [x @ w.T + 0.5 * x @ a.T @ b for w, a, b in zip(weights, downs, ups, strict=True)]
    found = list(ops.lora_linears(x, weights, downs, ups, 0.5))
    grad_only = list(ops.lora_linears(x, weights, downs, ups, 0.5, grad_only=True))
    torch.testing.assert_close(found, expected)
    want = gradients(expected)
    torch.testing.assert_close(gradients(found), want)
    torch.testing.assert_close(gradients(grad_only), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products_have_the_gradients_of_autograd(dtype: torch.dtype) -> None:
    """Also where the weights are of a higher precision than the computation."""
    x = random(11, 8).to(dtype).requires_grad_()
    weights = [random(size, 8).requires_grad_() for size in (5, 3)]
    probe = random(11, 8).to(dtype)

    def gradients(outs: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad((torch.cat(outs, 1) * probe).sum(), [x, *weights])

    expected = gradients([x @ weight.to(dtype).T for weight in weights])
    for outs in (
        list(backend(ops.linears, "torch")(x, weights)),
        [ops.linear_grad_only(x, weight) for weight in weights],
        [ops.fused_linears(x, weights)],
    ):
        found = gradients(outs)
        assert [g.dtype for g in found] == [dtype, torch.float64, torch.float64]
        torch.testing.assert_close(found, expected)
