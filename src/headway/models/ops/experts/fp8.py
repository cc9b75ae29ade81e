"""Experts in FP8 with block scales: products of groups of rows, each group with a weight of its own.

The output and both gradients are in FP8, as those of a linear layer are.
"""

from typing import Any

import torch
from torch import Tensor

from headway.models.ops.experts.fp8_gradients import fp8_grouped_weight_gradient, quantize_groups
from headway.models.ops.fp8.blocks import (
    BLOCK,
    Fp8Blocks,
    fp8_matmul,
    quantize_1x128,
    quantize_128x128,
    transpose_blocks,
)
from headway.models.ops.registry import Op, in_triton


@Op
def fp8_grouped_matmul(
    a_NK: Tensor, a_scales: Tensor, b_EOK: Tensor, b_scales: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """`fp8_matmul` of each group of rows (group e ends at `ends[e]`) with a weight of its own. Rows beyond the last end
    may hold anything."""
    out_NO = torch.zeros((len(a_NK), b_EOK.shape[1]), dtype=dtype, device=a_NK.device)
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        rows = slice(start, end)
        if end > start:
            weight = b_EOK[expert], b_scales[expert]
            out_NO[rows] = fp8_matmul.reference(a_NK[rows], a_scales[rows], *weight, dtype)
        start = end
    return out_NO


fp8_grouped_matmul.backend("triton", takes=in_triton)("headway.models.ops.triton.fp8_experts:fp8_grouped_matmul")


def fp8_grouped_linear(rows_NI: Tensor, weight_EOI: Tensor | Fp8Blocks, ends_E: Tensor) -> Tensor:
    """Apply every group's own weight, which is quantized in every pass or once. Outputs must be whole blocks."""
    frozen = weight_EOI if isinstance(weight_EOI, Fp8Blocks) else None
    trained = [weight_EOI] if isinstance(weight_EOI, Tensor) else []
    out: Tensor = _Fp8Grouped.apply(rows_NI, frozen, ends_E, *trained)  # type: ignore[no-untyped-call]  # torch has no types here
    return out


def quantize_experts(weight_EOI: Tensor, dtype: torch.dtype, out: Fp8Blocks | None = None) -> Fp8Blocks:
    """Quantize stacked weights, of whose rows blocks must be whole."""
    experts, rows, width = weight_EOI.shape
    flat = None if out is None else Fp8Blocks(out.values.flatten(0, 1), out.scales.flatten(0, 1))
    values, scales = quantize_128x128(weight_EOI.reshape(-1, width), dtype, False, flat)
    return Fp8Blocks(values.view(weight_EOI.shape), scales.view(experts, rows // BLOCK, -1))


class _Fp8Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NI: Tensor, frozen: Fp8Blocks | None, ends_E: Tensor, *trained: Tensor) -> Tensor:
        ctx.save_for_backward(rows_NI, ends_E, *trained)
        ctx.frozen = frozen
        table = frozen or quantize_experts(trained[0], rows_NI.dtype)
        return fp8_grouped_matmul(*quantize_1x128(rows_NI), *table, ends_E, rows_NI.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        rows_NI, ends_E, *trained = ctx.saved_tensors
        wants_rows, _, _, *wanted = ctx.needs_input_grad
        grad_rows: Tensor | None = None
        if wants_rows:
            table = transpose_blocks(ctx.frozen or quantize_experts(trained[0], grad_NO.dtype))
            grad_rows = fp8_grouped_matmul(*quantize_1x128(grad_NO), *table, ends_E, grad_NO.dtype)
        if not any(wanted):
            return grad_rows, None, None, *(None for _ in wanted)
        grad, rows = quantize_groups(grad_NO, ends_E), quantize_groups(rows_NI, ends_E)
        return grad_rows, None, None, fp8_grouped_weight_gradient(*grad, *rows, ends_E, trained[0].dtype)
