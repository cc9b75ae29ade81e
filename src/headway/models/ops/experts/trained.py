"""Routed experts as one operation to autograd.

As single operations, a layer of experts would keep and move rows of all choices many times, k rows for each token. As
one, it keeps its inputs and its first product, and moves rows twice in each direction: to the experts and back. The
last product is not kept: the gradient of a gate is the product of an output row and the gradient of its token, and so
that of the hidden row and its own gradient. Where a block is recomputed (`grad_only`), nothing is computed before the
backward pass, and there the first product alone.

Rows in FP8 are quantized as tokens, once instead of k times, and travel in 8 bits: the blocks lie within rows. For
weights' gradients, whose blocks lie across an expert's rows, they are quantized as choices.
"""

from typing import Any

import torch
from torch import Tensor

from headway.models.ops.experts.choices import Choices
from headway.models.ops.experts.fp8 import fp8_grouped_matmul, quantize_experts
from headway.models.ops.experts.fp8_gradients import fp8_grouped_weight_gradient, quantize_groups
from headway.models.ops.experts.gated_gradient import gated_gradient
from headway.models.ops.experts.grouped_linear import grouped_linear, grouped_weight_gradient
from headway.models.ops.experts.lists import ExpertLists
from headway.models.ops.experts.sum_choices import sum_choices
from headway.models.ops.fp8.blocks import FP8, Fp8Blocks, quantize_1x128, transpose_blocks
from headway.models.ops.gated_silu import gated_silu
from headway.models.ops.registry import cast

ExpertWeight = Tensor | Fp8Blocks
"""Of all experts, (E, out, in); quantized in every pass, where products are in FP8, or once."""
_Rows = tuple[Tensor, Tensor | None]
"""Those of choices, or of tokens and the token of each choice."""


def trained_experts(
    x_TD: Tensor,
    gates_Tk: Tensor,
    experts_Tk: Tensor,
    gate_up_EMD: ExpertWeight,
    down_EDI: ExpertWeight,
    fp8: bool = False,
    grad_only: bool = False,
    lists: ExpertLists | None = None,
    form: None = None,
) -> Tensor:
    """`routed_experts`, forward and backward. Rows are sorted, and lists of no use."""
    out_TD: Tensor = _TrainedExperts.apply(x_TD, gates_Tk, experts_Tk, gate_up_EMD, down_EDI, fp8, grad_only)  # type: ignore[no-untyped-call]  # torch has no types here
    return out_TD


class _TrainedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        gates_Tk: Tensor,
        experts_Tk: Tensor,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        fp8: bool,
        grad_only: bool,
    ) -> Tensor:
        weights = gate_up, down
        ctx.fp8, ctx.frozen = fp8, [weight if isinstance(weight, Fp8Blocks) else None for weight in weights]
        trained = [weight for weight in weights if isinstance(weight, Tensor)]
        if grad_only:
            ctx.choices = None
            ctx.save_for_backward(x_TD, gates_Tk, experts_Tk, None, *trained)
            return torch.empty_like(x_TD)
        ctx.choices = choices = Choices.of(experts_Tk, expert_count(down))
        products = _Products(choices)
        gate_up, down = (_operand(weight, x_TD.dtype, fp8) for weight in weights)
        wide_NM = products.outputs(x_TD, gate_up, of_tokens=True)
        ctx.save_for_backward(x_TD, gates_Tk, experts_Tk, wide_NM, *trained)
        return sum_choices(products.outputs(gated_silu(wide_NM), down), choices.places_Tk, gates_Tk)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, gates_Tk, experts_Tk, wide_NM, *trained = ctx.saved_tensors
        dtypes = [weight.dtype for weight in trained]
        gate_up, down = (_operand(frozen or trained.pop(0), x_TD.dtype, ctx.fp8) for frozen in ctx.frozen)
        wants_x, wants_gates, _, wants_gate_up, wants_down, *_ = ctx.needs_input_grad
        choices = ctx.choices or Choices.of(experts_Tk, expert_count(down))
        products = _Products(choices)
        if wide_NM is None:
            wide_NM = products.outputs(x_TD, gate_up, of_tokens=True)
        # Of the rows before they are weighted: weights come in with the activation's gradient.
        grad_NI = products.inputs(grad_TD, down, of_tokens=True)
        grad_NM, by_gate_N, weighted_NI = gated_gradient(wide_NM, grad_NI, gates_Tk.flatten()[choices.order_N])
        del wide_NM, grad_NI
        ends_E, tokens_N, grad_gate_up, grad_down = choices.ends_E, choices.tokens_N, None, None
        weight_gradient = _fp8_weight_gradient if ctx.fp8 else _weight_gradient
        if wants_down:
            grad_down = weight_gradient((grad_TD, tokens_N), (weighted_NI, None), ends_E, dtypes[-1])
        del weighted_NI
        if wants_gate_up:
            grad_gate_up = weight_gradient((grad_NM, None), (x_TD, tokens_N), ends_E, dtypes[0])
        grad_x = sum_choices(products.inputs(grad_NM, gate_up), choices.places_Tk) if wants_x else None
        grad_gates = by_gate_N[choices.places_Tk] if wants_gates else None
        return grad_x, grad_gates, None, grad_gate_up, grad_down, None, None


class _Products:
    """Products of rows, sorted by expert, with the weights of their experts."""

    def __init__(self, choices: Choices) -> None:
        self._tokens_N, self._ends_E = choices.tokens_N, choices.ends_E

    def outputs(self, x_TI: Tensor, weight_EOI: ExpertWeight, *, of_tokens: bool = False) -> Tensor:
        """(N, O). `of_tokens`: `x` has the rows of tokens, (T, I), and not (N, I) those of choices."""
        if isinstance(weight_EOI, Fp8Blocks):
            return self._fp8_product(x_TI, weight_EOI, of_tokens)
        return grouped_linear(x_TI[self._tokens_N] if of_tokens else x_TI, weight_EOI, self._ends_E)

    def inputs(self, grad_TO: Tensor, weight_EOI: ExpertWeight, *, of_tokens: bool = False) -> Tensor:
        """From gradients of outputs to those of inputs, (N, I)."""
        if isinstance(weight_EOI, Fp8Blocks):
            return self._fp8_product(grad_TO, transpose_blocks(weight_EOI), of_tokens)
        return self.outputs(grad_TO, weight_EOI.transpose(-2, -1), of_tokens=of_tokens)

    def _fp8_product(self, x_TK: Tensor, table: Fp8Blocks, of_tokens: bool) -> Tensor:
        values, scales = quantize_1x128(x_TK)
        if of_tokens:
            # As bytes: torch has few operations on FP8. Scales stay as they lie, column by column.
            values = values.view(torch.uint8)[self._tokens_N].view(FP8)
            scales = scales.t()[:, self._tokens_N].t()
        return fp8_grouped_matmul(values, scales, *table, self._ends_E, x_TK.dtype)


def _weight_gradient(grad: _Rows, rows: _Rows, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    grad_NO, rows_NI = (x if tokens_N is None else x[tokens_N] for x, tokens_N in (grad, rows))
    return grouped_weight_gradient(grad_NO, rows_NI, ends_E, dtype)


def _fp8_weight_gradient(grad: _Rows, rows: _Rows, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows are gathered where they are quantized: no copy of them is made in their own precision."""
    grads, inputs = (quantize_groups(x, ends_E, tokens_N) for x, tokens_N in (grad, rows))
    return fp8_grouped_weight_gradient(*grads, *inputs, ends_E, dtype)


def expert_count(weight_EOI: ExpertWeight) -> int:
    return len(weight_EOI.values if isinstance(weight_EOI, Fp8Blocks) else weight_EOI)


def _operand(weight_EOI: ExpertWeight, dtype: torch.dtype, fp8: bool) -> ExpertWeight:
    """A weight as the products of a pass take it."""
    if isinstance(weight_EOI, Fp8Blocks):
        return weight_EOI
    return quantize_experts(weight_EOI, dtype) if fp8 else cast(weight_EOI, dtype)
