"""Products of linear layers: one weight or several over one input, with LoRA adapters, in mixed precision.

Weights may be of a higher precision than their input: they are cast where they are used, and their gradients come in
the weights' own precision.

Most backends here write gradients out. Left to autograd, a layer with an adapter would copy its output to add the
adapter's, and its input's gradient to add another; here both are added inside the large products. And autograd cannot
be asked for the gradients of a layer without its output, which is what recomputing the last layer of a block would
otherwise be for.
"""

import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.ops.native.library import dense_rows, kernels
from headway.models.ops.registry import Op, cast, in_c, in_triton

Tensors = Sequence[Tensor]
Scale = float | Tensor
"""The factor of an adapter's ranks: one number, or one for each token and rank (T, rank), the same in all layers."""

ON_ARM = platform.machine() in ("aarch64", "arm64")
_SMALL = 2**17
_NARROW = 512


@Op
def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear`."""
    return F.linear(x_TI, cast(weight_OI, x_TI.dtype), None if bias_O is None else cast(bias_O, x_TI.dtype))


@Op
def linears(x_TI: Tensor, weights: Tensors) -> Tensors:
    """`linear` with each weight (out, in)."""
    return [linear(x_TI, weight) for weight in weights]


@Op
def wide_linears(x_TI: Tensor, weights: Tensors) -> Tensors:
    """`linears` in float32, sums that are not rounded to the precision of their factors."""
    return [F.linear(x_TI.float(), cast(weight, x_TI.dtype).float()) for weight in weights]


@Op
def fused_linears(x_TI: Tensor, weights: Tensors) -> Tensor:
    """`linears` side by side in one tensor."""
    return torch.cat([linear(x_TI, weight) for weight in weights], -1)


@Op
def lora_linears(
    x_TI: Tensor, weights: Tensors, downs: Tensors, ups: Tensors, scale: Scale, grad_only: bool = False
) -> Tensors:
    """x @ weight.T + scale * (x @ down.T) @ up for each weight (out, in), down (rank, in) and up (rank, out).

    Weights and scale get no gradient. With `grad_only` the results may hold anything, but have their gradients.
    """
    dtype = x_TI.dtype
    ranks = [cast(scale * linear(x_TI, down), dtype) for down in downs]
    each = zip(weights, ranks, ups, strict=True)
    return [linear(x_TI, weight.detach()) + own_TR @ cast(up, dtype) for weight, own_TR, up in each]


@Op
def linear_grad_only(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """A tensor that has the gradients of `linear`, and may hold anything."""
    return linear(x_TI, weight_OI)


def prefers_fused(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Tell if `fused_linears` is faster than `linears` with weights like this one, where kernels take its parts: one
    large product is, forward and backward, where it also adds up the input's gradient. But weights that need no cast
    would have to be moved."""
    return weight_OI.dtype != x_TI.dtype and in_triton(x_TI)


def tune_matmul(width: int) -> None:
    """Choose between oneDNN and the BLAS library for models of this width, for the whole process.

    On ARM, oneDNN takes half a millisecond to prepare each product, whatever its size: eight times the product
    itself at width 128. Wide models are better off with it. Elsewhere torch's own choice stays.
    """
    if ON_ARM:
        torch.backends.mkldnn.set_flags(width >= _NARROW)  # type: ignore[no-untyped-call]  # torch has no types here


def _multiplies(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> bool:
    """C is faster than torch on ARM, for several rows and weights that fit near caches."""
    return ON_ARM and bias_O is None and in_c(x_TI) and x_TI.shape[0] >= 4 and weight_OI.numel() <= _SMALL


@linear.backend("c", takes=_multiplies)
def _linear_c(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    x_TI = dense_rows(x_TI)
    outputs, inputs = weight_OI.shape
    rows = x_TI.shape[0]
    out = torch.empty(rows, outputs)
    kernels().product(
        x_TI.data_ptr(), x_TI.stride(0), rows, weight_OI.data_ptr(), outputs, inputs, out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


@linear.backend("torch", takes=lambda x, weight, bias=None: weight.dtype != x.dtype, trains=True)
def _mixed_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    out_TO: Tensor = _Linears.apply(x_TI, False, False, weight_OI)[0]  # type: ignore[no-untyped-call]  # torch has no types here
    return out_TO if bias_O is None else out_TO + cast(bias_O, out_TO.dtype)


@linears.backend("torch", takes=lambda x, weights: x.is_cuda and torch.is_grad_enabled(), trains=True)
def _linears(x_TI: Tensor, weights: Tensors) -> Tensors:
    outs: tuple[Tensor, ...] = _Linears.apply(x_TI, False, False, *weights)  # type: ignore[no-untyped-call]  # as above
    return outs


@wide_linears.backend("cuda", takes=lambda x, weights: x.dtype.itemsize == 2, trains=True)
def _wide_linears(x_TI: Tensor, weights: Tensors) -> Tensors:
    outs: tuple[Tensor, ...] = _WideLinears.apply(x_TI, *weights)  # type: ignore[no-untyped-call]  # as above
    return outs


@fused_linears.backend("torch", takes=lambda x, weights: True, trains=True)
def _fused_linears(x_TI: Tensor, weights: Tensors) -> Tensor:
    out: Tensor = _Linears.apply(x_TI, True, False, *weights)[0]  # type: ignore[no-untyped-call]  # as above
    return out


@lora_linears.backend("torch", takes=lambda *_: True, trains=True)
def _lora_linears(
    x_TI: Tensor, weights: Tensors, downs: Tensors, ups: Tensors, scale: Scale, grad_only: bool = False
) -> Tensors:
    adapters = (cast(adapter, x_TI.dtype) for adapter in (*downs, *ups))
    outs: tuple[Tensor, ...] = _LoraLinears.apply(  # type: ignore[no-untyped-call]  # as above
        x_TI, scale, grad_only, len(weights), *weights, *adapters
    )
    return outs


@linear_grad_only.backend("torch", takes=lambda *_: True, trains=True)
def _linear_grad_only(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    out: Tensor = _Linears.apply(x_TI, False, True, weight_OI)[0]  # type: ignore[no-untyped-call]  # as above
    return out


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, scale: Scale, grad_only: bool, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        weights, downs, ups = (tensors[n * count : (n + 1) * count] for n in range(3))
        ranks_TR = scaled_product(x_TI, stacked(downs).T, scale)
        ctx.save_for_backward(x_TI, ranks_TR, *tensors)
        ctx.scale = scale
        if grad_only:
            return tuple(x_TI.new_empty(len(x_TI), len(weight)) for weight in weights)
        parts = zip(weights, ups, rank_parts(ranks_TR, downs), strict=True)
        return tuple((own_TR @ up).addmm_(x_TI, cast(weight, x_TI.dtype).T) for weight, up, own_TR in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, ranks_TR, *tensors = ctx.saved_tensors
        count = len(tensors) // 3
        weights, downs, ups = (tensors[n * count : (n + 1) * count] for n in range(3))
        grad_ups = [own_TR.T @ grad for own_TR, grad in zip(rank_parts(ranks_TR, downs), grads, strict=True)]
        grad_ranks_TR = torch.empty_like(ranks_TR)
        for grad, up, own_TR in zip(grads, ups, rank_parts(grad_ranks_TR, downs), strict=True):
            scaled_product(grad, up.T, ctx.scale, out=own_TR)
        grad_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            grad_x = _summed_products(grads, weights, grad_ranks_TR @ stacked(downs))
        grad_downs = torch.split(grad_ranks_TR.T @ x_TI, [len(down) for down in downs])
        return grad_x, None, None, None, *[None] * count, *grad_downs, *grad_ups


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, fused: bool, grad_only: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        tables = [_joined(weights, x_TI.dtype)] if fused else [cast(weight, x_TI.dtype) for weight in weights]
        ctx.save_for_backward(x_TI, *tables)
        ctx.dtypes, ctx.sizes = [weight.dtype for weight in weights], [len(weight) for weight in weights]
        return tuple(x_TI.new_empty(len(x_TI), len(table)) if grad_only else x_TI @ table.T for table in tables)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, *tables = ctx.saved_tensors
        wants_x, _, _, *wanted = ctx.needs_input_grad
        grad_x = _summed_products(grads, tables) if wants_x else None
        if len(tables) < len(wanted):
            whole = _weight_gradient(grads[0], x_TI, ctx.dtypes[0]) if any(wanted) else None
            parts = [None] * len(wanted) if whole is None else torch.split(whole, ctx.sizes)
            return grad_x, None, None, *(part if wants else None for part, wants in zip(parts, wanted, strict=True))
        each = zip(grads, ctx.dtypes, wanted, strict=True)
        grad_weights = (_weight_gradient(grad, x_TI, dtype) if wants else None for grad, dtype, wants in each)
        return grad_x, None, None, *grad_weights


class _WideLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        tables = [cast(weight, x_TI.dtype) for weight in weights]
        ctx.save_for_backward(x_TI, *tables)
        ctx.dtypes = [weight.dtype for weight in weights]
        return tuple(torch.mm(x_TI, table.T, out_dtype=torch.float32) for table in tables)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, *tables = ctx.saved_tensors
        wants_x, *wanted = ctx.needs_input_grad
        grads = tuple(grad.to(x_TI.dtype) for grad in grads)
        each = zip(grads, ctx.dtypes, wanted, strict=True)
        grad_weights = [_weight_gradient(grad, x_TI, dtype) if wants else None for grad, dtype, wants in each]
        return _summed_products(grads, tables) if wants_x else None, *grad_weights


def _summed_products(grads: Tensors, weights: Tensors, total: Tensor | None = None) -> Tensor:
    """Σ grad @ weight, added to `total` in place."""
    for grad, weight in zip(grads, weights, strict=True):
        weight = cast(weight, grad.dtype)
        total = grad @ weight if total is None else total.addmm_(grad, weight)
    assert total is not None
    return total


def scaled_product(left: Tensor, right: Tensor, scale: Scale, out: Tensor | None = None) -> Tensor:
    """scale * left @ right, also into some columns of a wider matrix; with one number, no pass over the result by
    itself."""
    if out is None:
        out = left.new_empty(len(left), right.shape[1])
    if isinstance(scale, Tensor):
        for part in torch.split(torch.mm(left, right, out=out), scale.shape[1], dim=1):
            part.mul_(scale)
        return out
    return torch.addmm(out, left, right, beta=0, alpha=scale, out=out)


def _weight_gradient(grad_TO: Tensor, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient in the weight's own precision, without rounding to that of the computation before."""
    if dtype != x_TI.dtype and x_TI.is_cuda:
        return torch.mm(grad_TO.T, x_TI, out_dtype=dtype)
    return (grad_TO.T @ x_TI).to(dtype)


def _joined(weights: Tensors, dtype: torch.dtype) -> Tensor:
    """The weights one below the other, cast in one go."""
    sizes = [len(weight) for weight in weights]
    table = weights[0].new_empty(sum(sizes), weights[0].shape[1], dtype=dtype)
    torch._foreach_copy_(list(torch.split(table, sizes)), list(weights))
    return table


def stacked(matrices: Tensors) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))


def rank_parts(ranks_TR: Tensor, downs: Tensors) -> Tensors:
    """The columns of each layer's ranks."""
    return torch.split(ranks_TR, [len(down) for down in downs], dim=1)
