"""Products of linear layers as single operations whose gradients are written out.

Left to autograd, a layer with an adapter would copy its output to add the adapter's, and its input's gradient to add
another; here both are added inside the large products. And autograd cannot be asked for the gradients of a layer
without its output, which is what recomputing the last layer of a block would otherwise be for.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def adapted(
    x_TI: Tensor,
    weights: Sequence[Tensor],
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    scale: float,
    *,
    valued: bool = True,
) -> Sequence[Tensor]:
    """x @ weight.T + scale * (x @ down.T) @ up for each weight (out, in), down (rank, in) and up (rank, out).

    The weights get no gradient. Where not `valued` the results hold anything, but have their gradients.
    """
    outs: tuple[Tensor, ...] = _Adapted.apply(  # type: ignore[no-untyped-call]  # torch has no types here
        x_TI, scale, valued, len(weights), *weights, *downs, *ups
    )
    return outs


def unvalued_product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Has the gradients of x @ weight.T, and holds anything."""
    out: Tensor = _UnvaluedProduct.apply(x_TI, weight_OI)  # type: ignore[no-untyped-call]  # as above
    return out


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, scale: float, valued: bool, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, downs, ups = (tensors[n * count : (n + 1) * count] for n in range(3))
        ranks_TR = (x_TI @ _stacked(downs).T) * scale
        outs = []
        for weight, up, own_TR in zip(weights, ups, _parts(ranks_TR, downs), strict=True):
            outs.append((own_TR @ up).addmm_(x_TI, weight.T) if valued else x_TI.new_empty(len(x_TI), len(weight)))
        ctx.save_for_backward(x_TI, ranks_TR, *tensors)
        ctx.scale = scale
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, ranks_TR, *tensors = ctx.saved_tensors
        count = len(tensors) // 3
        weights, downs, ups = (tensors[n * count : (n + 1) * count] for n in range(3))
        grad_ranks_TR = torch.empty_like(ranks_TR)
        grad_ups = []
        for grad, up, own_TR, into in zip(
            grads, ups, _parts(ranks_TR, downs), _parts(grad_ranks_TR, downs), strict=True
        ):
            into.copy_(grad @ up.T)
            grad_ups.append(own_TR.T @ grad)
        grad_ranks_TR *= ctx.scale
        grad_downs = torch.split(grad_ranks_TR.T @ x_TI, [len(down) for down in downs])
        grad_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_ranks_TR @ _stacked(downs)
            for grad, weight in zip(grads, weights, strict=True):
                grad_x.addmm_(grad, weight)
        return grad_x, None, None, None, *[None] * count, *grad_downs, *grad_ups


class _UnvaluedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return x_TI.new_empty(len(x_TI), len(weight_OI))

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TI, weight_OI = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        return grad_TO @ weight_OI if wants_x else None, grad_TO.T @ x_TI if wants_weight else None


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))


def _parts(ranks_TR: Tensor, downs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The columns of each layer's ranks."""
    return torch.split(ranks_TR, [len(down) for down in downs], dim=1)
