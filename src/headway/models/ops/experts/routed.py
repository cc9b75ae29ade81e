"""The gated MLPs of the experts that tokens chose, weighted and summed: a mixture of experts after its router."""

from typing import Any

import torch
from torch import Tensor

from headway.models.ops.experts.choices import Choices
from headway.models.ops.experts.form import ExpertForm
from headway.models.ops.experts.fp8 import fp8_grouped_linear
from headway.models.ops.experts.grouped_linear import grouped_linear
from headway.models.ops.experts.lists import FEW_TOKENS, ExpertLists
from headway.models.ops.experts.sum_choices import sum_choices
from headway.models.ops.experts.trained import ExpertWeight, expert_count, trained_experts
from headway.models.ops.fp8.blocks import Fp8Blocks
from headway.models.ops.gated_silu import gated_silu
from headway.models.ops.registry import Op, in_triton_serving
from headway.models.ops.rms_norm import add_rms_norm

_SIDE = 64
"""The Triton kernels' smallest tile of a weight."""


@Op
def routed_experts(
    x_TD: Tensor,
    gates_Tk: Tensor,
    experts_Tk: Tensor,
    gate_up_EMD: ExpertWeight,
    down_EDI: ExpertWeight,
    fp8: bool = False,
    grad_only: bool = False,
    lists: ExpertLists | None = None,
    form: ExpertForm | None = None,
) -> Tensor:
    """down(silu(gate) * up) of each of a token's `experts`, times its gate, summed over them: (T, D). M = 2 * I: gates
    above ups. `grad_only`: the result may hold anything, but has its gradients. `lists` are those of `experts`, where
    they are known. `form` says what is otherwise."""
    choices = Choices.of(experts_Tk, expert_count(down_EDI))
    gate_up_bias, down_bias, activation = form or (None, None, gated_silu)
    wide_NM = _linear(x_TD[choices.tokens_N], gate_up_EMD, gate_up_bias, choices, fp8)
    out_ND = _linear(activation(wide_NM), down_EDI, down_bias, choices, fp8)
    return sum_choices(out_ND, choices.places_Tk, gates_Tk)


@Op
def add_routed_experts(
    x_TD: Tensor,
    gates_Tk: Tensor,
    experts_Tk: Tensor,
    gate_up_EMD: ExpertWeight,
    down_EDI: ExpertWeight,
    fp8: bool,
    stream_TD: Tensor,
    beside_TD: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    lists: ExpertLists | None = None,
    form: ExpertForm | None = None,
) -> tuple[Tensor, Tensor]:
    """The stream with `routed_experts`, and what is computed `beside` them, added to it, and the norm of that: between
    two blocks."""
    out_TD = routed_experts(x_TD, gates_Tk, experts_Tk, gate_up_EMD, down_EDI, fp8, False, lists, form)
    return add_rms_norm(stream_TD, out_TD if beside_TD is None else out_TD + beside_TD, norm_weight, eps)


def _linear(rows_NI: Tensor, weight_EOI: ExpertWeight, bias_EO: Tensor | None, choices: Choices, fp8: bool) -> Tensor:
    if fp8 or isinstance(weight_EOI, Fp8Blocks):
        out_NO = fp8_grouped_linear(rows_NI, weight_EOI, choices.ends_E)
    else:
        out_NO = grouped_linear(rows_NI, weight_EOI, choices.ends_E)
    return out_NO if bias_EO is None else out_NO + bias_EO.to(out_NO.dtype)[choices.experts_N.long()]


def _few_rows(
    x_TD: Tensor, gates_Tk: Tensor, experts_Tk: Tensor, gate_up_EMD: Tensor, down_EDI: Tensor, fp8: bool = False,
    *_: Any,
) -> bool:  # fmt: skip
    if fp8 or not in_triton_serving(x_TD) or len(x_TD) > FEW_TOKENS:
        return False
    aligned = down_EDI.shape[1] % _SIDE == 0 and down_EDI.shape[2] % _SIDE == 0
    return aligned and x_TD.dtype is not torch.float32 and x_TD.dtype is gate_up_EMD.dtype


def _plain(
    x_TD: Tensor, gates_Tk: Tensor, experts_Tk: Tensor, gate_up_EMD: ExpertWeight, down_EDI: ExpertWeight,
    fp8: bool = False, grad_only: bool = False, lists: ExpertLists | None = None, form: ExpertForm | None = None,
) -> bool:  # fmt: skip
    return form is None


_TRITON = "headway.models.ops.triton.routed_experts"
routed_experts.backend("triton", takes=_few_rows)(f"{_TRITON}:routed_experts")
add_routed_experts.backend("triton", takes=_few_rows)(f"{_TRITON}:add_routed_experts")
routed_experts.backend("torch", takes=_plain, trains=True)(trained_experts)
