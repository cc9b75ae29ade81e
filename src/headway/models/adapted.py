"""Products of linear layers as single operations whose gradients are written out.

Left to autograd, a layer with an adapter would copy its output to add the adapter's, and its input's gradient to add
another; here both are added inside the large products. And autograd cannot be asked for the gradients of a layer
without its output, which is what recomputing the last layer of a block would otherwise be for.

Layers whose weights must be cast anyway may be computed together: one large product is faster than some smaller ones,
forward as well as backward, where it also adds up the input's gradient by itself.
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


def products(x_TI: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """x @ weight.T for each weight (out, in), which may be of a higher precision than the computation."""
    outs: tuple[Tensor, ...] = _Products.apply(x_TI, False, *weights)  # type: ignore[no-untyped-call]  # as above
    return outs


def products_together(x_TI: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """`products` side by side in one tensor."""
    out: Tensor = _Products.apply(x_TI, True, *weights)[0]  # type: ignore[no-untyped-call]  # as above
    return out


def unvalued_product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Has the gradients of x @ weight.T, and holds anything."""
    out: Tensor = _UnvaluedProduct.apply(x_TI, weight_OI)  # type: ignore[no-untyped-call]  # as above
    return out


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, scale: float, valued: bool, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, downs, ups = (tensors[n * count : (n + 1) * count] for n in range(3))
        ranks_TR = _scaled_product(x_TI, _stacked(downs).T, scale)
        ctx.save_for_backward(x_TI, ranks_TR, *tensors)
        ctx.scale = scale
        if not valued:
            return tuple(x_TI.new_empty(len(x_TI), len(weight)) for weight in weights)
        parts = zip(weights, ups, _parts(ranks_TR, downs), strict=True)
        return tuple((own_TR @ up).addmm_(x_TI, weight.T) for weight, up, own_TR in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, ranks_TR, *tensors = ctx.saved_tensors
        count = len(tensors) // 3
        weights, downs, ups = (tensors[n * count : (n + 1) * count] for n in range(3))
        grad_ups = [own_TR.T @ grad for own_TR, grad in zip(_parts(ranks_TR, downs), grads, strict=True)]
        grad_ranks_TR = torch.empty_like(ranks_TR)
        for grad, up, own_TR in zip(grads, ups, _parts(grad_ranks_TR, downs), strict=True):
            _scaled_product(grad, up.T, ctx.scale, out=own_TR)
        grad_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            grad_x = _summed_products(grads, weights, grad_ranks_TR @ _stacked(downs))
        grad_downs = torch.split(grad_ranks_TR.T @ x_TI, [len(down) for down in downs])
        return grad_x, None, None, None, *[None] * count, *grad_downs, *grad_ups


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, together: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        tables = [_joined(weights, x_TI.dtype)] if together else [weight.to(x_TI.dtype) for weight in weights]
        ctx.save_for_backward(x_TI, *tables)
        ctx.dtypes, ctx.sizes = [weight.dtype for weight in weights], [len(weight) for weight in weights]
        return tuple(x_TI @ table.T for table in tables)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, *tables = ctx.saved_tensors
        wants_x, _, *wanted = ctx.needs_input_grad
        grad_x = _summed_products(grads, tables) if wants_x else None
        if len(tables) < len(wanted):
            whole = _weight_gradient(grads[0], x_TI, ctx.dtypes[0]) if any(wanted) else None
            parts = [None] * len(wanted) if whole is None else torch.split(whole, ctx.sizes)
            return grad_x, None, *(part if wants else None for part, wants in zip(parts, wanted, strict=True))
        each = zip(grads, ctx.dtypes, wanted, strict=True)
        return grad_x, None, *(_weight_gradient(grad, x_TI, dtype) if wants else None for grad, dtype, wants in each)


class _UnvaluedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI.to(x_TI.dtype))
        ctx.dtype = weight_OI.dtype
        return x_TI.new_empty(len(x_TI), len(weight_OI))

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TI, table_OI = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        grad_x = grad_TO @ table_OI if wants_x else None
        return grad_x, _weight_gradient(grad_TO, x_TI, ctx.dtype) if wants_weight else None


def _summed_products(grads: Sequence[Tensor], weights: Sequence[Tensor], total: Tensor | None = None) -> Tensor:
    """Σ grad @ weight, added to `total` in place."""
    for grad, weight in zip(grads, weights, strict=True):
        total = grad @ weight if total is None else total.addmm_(grad, weight)
    assert total is not None
    return total


def _scaled_product(left: Tensor, right: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """scale * left @ right, also into some columns of a wider matrix: no pass over the result by itself."""
    if out is None:
        out = left.new_empty(len(left), right.shape[1])
    return torch.addmm(out, left, right, beta=0, alpha=scale, out=out)


def _weight_gradient(grad_TO: Tensor, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """In the weight's own precision, without rounding to that of the computation before."""
    if dtype != x_TI.dtype and x_TI.is_cuda:
        return torch.mm(grad_TO.T, x_TI, out_dtype=dtype)
    return (grad_TO.T @ x_TI).to(dtype)


def _joined(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weights one below the other, cast in one go."""
    sizes = [len(weight) for weight in weights]
    table = weights[0].new_empty(sum(sizes), weights[0].shape[1], dtype=dtype)
    torch._foreach_copy_(list(torch.split(table, sizes)), list(weights))
    return table


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))


def _parts(ranks_TR: Tensor, downs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The columns of each layer's ranks."""
    return torch.split(ranks_TR, [len(down) for down in downs], dim=1)
