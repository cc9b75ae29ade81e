"""Linear layers in FP8 with block scales, with or without LoRA adapters: output and both gradients.

    output   x (1x128)            times  weight (128x128)
    d input  gradient (1x128)     times  weight (128x128)
    d weight gradient, transposed (1x128 along tokens)  times  input, transposed (1x128 along tokens)

Each product quantizes its operands anew from the precision of the computation; the quantization itself has the
gradient of the identity (straight through). Layers over one input are one product where their outputs are whole blocks.
Adapters are computed in the precision of the computation, or beside a weight that was quantized once (`ranks`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.models.ops.fp8.blocks import (
    BLOCK,
    FP8,
    Fp8Blocks,
    blocks_of,
    fp8_matmul,
    fp8_matmul_parts,
    quantize_1x128,
    quantize_128x128,
    quantize_columns,
    quantized_rows,
    splits_sums,
    transpose_blocks,
)
from headway.models.ops.fp8.ranks import rank_columns, rows_with_ranks, weights_with_ranks
from headway.models.ops.linear import Scale, rank_parts, scaled_product, stacked
from headway.models.ops.registry import cast

SHARE = 8
"""Columns of ranks are at most this part of a weight's; the adapters of smaller weights are added."""

Tensors = Sequence[Tensor]
Weights = Sequence[Tensor | Fp8Blocks]
"""Of layers over one input: (out, in), to be quantized in every pass, or quantized once, by layer or joined."""


def fp8_linears(x_TI: Tensor, weights: Weights, grad_only: bool = False) -> Tensor:
    """Compute x @ weight.T of each weight, side by side. `grad_only`: the result may hold anything, but has its
    gradients."""
    frozen = [weight for weight in weights if isinstance(weight, Fp8Blocks)]
    trained = [weight for weight in weights if isinstance(weight, Tensor)]
    out: Tensor = _Fp8Linears.apply(x_TI, frozen, grad_only, *trained)  # type: ignore[no-untyped-call]  # torch has no types here
    return out


def fp8_summands(x_TI: Tensor, weight: Tensor | Fp8Blocks) -> Tensor:
    """Compute x @ weight.T for `add_rms_norm`: in parts (S, T, out) where a kernel makes those, else (T, out)."""
    if isinstance(weight, Fp8Blocks) and splits_sums(x_TI):
        return fp8_matmul_parts(*quantized_rows(x_TI), *weight)
    return fp8_linears(x_TI, [weight])


def fp8_lora_linears(
    x_TI: Tensor, weights: Weights, downs: Tensors, ups: Tensors, scale: Scale, grad_only: bool = False
) -> Tensor:
    """Compute x @ weight.T + scale * (x @ down.T) @ up of each layer's weight, down (rank, in) and up (rank, out),
    side by side. The weights get no gradient."""
    adapters = (cast(adapter, x_TI.dtype) for adapter in (*downs, *ups))
    out: Tensor = _Fp8LoraLinears.apply(x_TI, list(weights), scale, grad_only, *adapters)  # type: ignore[no-untyped-call]  # as above
    return out


class _Fp8Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, frozen: list[Fp8Blocks], grad_only: bool, *trained: Tensor) -> Tensor:
        weights: Weights = trained or frozen
        ctx.save_for_backward(x_TI, *trained)
        ctx.frozen = frozen
        return _empty(x_TI, weights) if grad_only else _output(x_TI, weights)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, *trained = ctx.saved_tensors
        wants_x, _, _, *wanted = ctx.needs_input_grad
        grad_x = _input_gradient(grad_TO, trained or ctx.frozen) if wants_x else None
        grads = _weight_gradients(grad_TO, x_TI, trained) if any(wanted) else [None] * len(trained)
        return grad_x, None, None, *(grad if wants else None for grad, wants in zip(grads, wanted, strict=True))


class _Fp8LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weights: Weights, scale: Scale, grad_only: bool, *adapters: Tensor) -> Tensor:
        downs, ups = _halves(adapters)
        ranks_TR = scaled_product(x_TI, stacked(downs).T, scale)
        ctx.save_for_backward(x_TI, ranks_TR, *adapters)
        ctx.weights, ctx.scale = weights, scale
        if grad_only:
            return _empty(x_TI, weights)
        if (table := _with_room(weights, ranks_TR)) is not None:
            return fp8_matmul(*rows_with_ranks(x_TI, ranks_TR), *weights_with_ranks(beside(ups), table), x_TI.dtype)
        out_TO = _output(x_TI, weights)
        sizes = [up.shape[1] for up in ups]
        for part, own_TR, up in zip(torch.split(out_TO, sizes, 1), rank_parts(ranks_TR, downs), ups, strict=True):
            part.addmm_(own_TR, up)
        return out_TO

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, ranks_TR, *adapters = ctx.saved_tensors
        weights = ctx.weights
        downs, ups = _halves(adapters)
        grads = torch.split(grad_TO, [up.shape[1] for up in ups], 1)
        grad_ups = [own_TR.T @ grad for own_TR, grad in zip(rank_parts(ranks_TR, downs), grads, strict=True)]
        grad_ranks_TR = torch.empty_like(ranks_TR)
        for grad, up, own_TR in zip(grads, ups, rank_parts(grad_ranks_TR, downs), strict=True):
            scaled_product(grad, up.T, ctx.scale, out=own_TR)
        grad_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            grad_x = _lora_input_gradient(grad_TO, weights, grad_ranks_TR, stacked(downs))
        grad_downs = torch.split(grad_ranks_TR.T @ x_TI, [len(down) for down in downs])
        return grad_x, None, None, None, *grad_downs, *grad_ups


def _halves(adapters: Tensors) -> tuple[Tensors, Tensors]:
    return adapters[: len(adapters) // 2], adapters[len(adapters) // 2 :]


def join_blocks(tables: Sequence[Fp8Blocks]) -> Fp8Blocks | None:
    """Lay quantized weights one below the other; None where one does not end with a whole block."""
    if any(len(table.values) % BLOCK for table in tables):
        return None
    values = torch.cat([table.values.view(torch.uint8) for table in tables]).view(FP8)
    return Fp8Blocks(values, torch.cat([table.scales for table in tables]))


def _output(x_TI: Tensor, weights: Weights) -> Tensor:
    x = quantized_rows(x_TI)
    parts = [fp8_matmul(*x, *table, x_TI.dtype) for table in _tables(weights, x_TI.dtype)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _input_gradient(grad_TO: Tensor, weights: Weights) -> Tensor:
    total: Tensor | None = None
    tables = _tables(weights, grad_TO.dtype, transposed=True)
    for grad, table in zip(torch.split(grad_TO, [t.values.shape[1] for t in tables], 1), tables, strict=True):
        part = fp8_matmul(*quantize_1x128(grad), *table, grad.dtype)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _lora_input_gradient(grad_TO: Tensor, weights: Weights, grad_ranks_TR: Tensor, downs_RI: Tensor) -> Tensor:
    if (table := _with_room(weights, grad_ranks_TR)) is None:
        return _input_gradient(grad_TO, weights).addmm_(grad_ranks_TR, downs_RI)
    rows = rows_with_ranks(grad_TO, grad_ranks_TR)
    return fp8_matmul(*rows, *weights_with_ranks(downs_RI, table, transposed=True), grad_TO.dtype)


def _with_room(weights: Weights, ranks_TR: Tensor) -> Fp8Blocks | None:
    """The one quantized weight beside which ranks fit: of whole blocks, and so wide that their columns cost little."""
    if len(weights) > 1 or not isinstance(table := weights[0], Fp8Blocks) or ranks_TR.dtype is torch.float32:
        return None
    whole = all(size % BLOCK == 0 for size in table.values.shape)
    return table if whole and min(table.values.shape) >= SHARE * rank_columns(ranks_TR.shape[1]) else None


def beside(ups: Tensors) -> Tensor:
    """Second halves of layers side by side, (ranks of all, outputs of all): zeros where a rank is another layer's."""
    whole: Tensor = ups[0] if len(ups) == 1 else torch.block_diag(*ups)  # type: ignore[no-untyped-call]  # torch has no types here
    return whole


def _weight_gradients(grad_TO: Tensor, x_TI: Tensor, weights: Tensors) -> list[Tensor]:
    """In the weights' own precision."""
    x = quantize_columns(x_TI)
    sizes = [len(weight) for weight in weights]
    if not _whole_blocks(weights):
        parts = zip(torch.split(grad_TO, sizes, 1), weights, strict=True)
        return [fp8_matmul(*quantize_columns(grad), *x, weight.dtype) for grad, weight in parts]
    whole = fp8_matmul(*quantize_columns(grad_TO), *x, weights[0].dtype)
    return list(torch.split(whole, sizes))


def _tables(weights: Weights, dtype: torch.dtype, transposed: bool = False) -> list[Fp8Blocks]:
    """The weights quantized: one table of all, where each has whole blocks, else one of each; `transposed`: (in, out),
    side by side."""
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    if not tensors:
        tables = [weight for weight in weights if isinstance(weight, Fp8Blocks)]
        return [transpose_blocks(table) for table in tables] if transposed else tables
    if len(tensors) == 1 or not _whole_blocks(tensors):
        return [quantize_128x128(weight, dtype, transposed) for weight in tensors]
    rows, width = sum(map(len, tensors)), tensors[0].shape[1]
    shape = (width, rows) if transposed else (rows, width)
    table = Fp8Blocks(
        torch.empty(shape, dtype=FP8, device=tensors[0].device),
        torch.empty([blocks_of(size) for size in shape], device=tensors[0].device),
    )
    axis = 1 if transposed else 0
    sizes = [len(weight) for weight in tensors]
    places = torch.split(table.values, sizes, axis), torch.split(table.scales, [n // BLOCK for n in sizes], axis)
    for weight, values, scales in zip(tensors, *places, strict=True):
        quantize_128x128(weight, dtype, transposed, Fp8Blocks(values, scales))
    return [table]


def _whole_blocks(weights: Tensors) -> bool:
    return all(len(weight) % BLOCK == 0 for weight in weights)


def _empty(x_TI: Tensor, weights: Weights) -> Tensor:
    return x_TI.new_empty(len(x_TI), sum(len(_values(weight)) for weight in weights))


def _values(weight: Tensor | Fp8Blocks) -> Tensor:
    return weight.values if isinstance(weight, Fp8Blocks) else weight
