"""The gated MLPs of the experts that tokens chose, weighted and summed: a mixture of experts after its router."""

import torch
from torch import Tensor

from headway.models.ops.choices import Choices
from headway.models.ops.fp8 import Fp8Blocks
from headway.models.ops.fp8_experts import fp8_grouped_linear
from headway.models.ops.gated_silu import gated_silu
from headway.models.ops.grouped_linear import grouped_linear
from headway.models.ops.registry import Op, in_triton_serving
from headway.models.ops.sum_choices import sum_choices
from headway.models.ops.trained_experts import ExpertWeight, expert_count, trained_experts

_FEW_TOKENS = 1024
"""Beyond, experts have so many rows each that products are bound by arithmetic, where sorted rows are better."""
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
) -> Tensor:
    """down(silu(gate) * up) of each of a token's `experts`, times its gate, summed over them: (T, D). M = 2 * I: gates
    above ups. `grad_only`: the result may hold anything, but has its gradients."""
    choices = Choices.of(experts_Tk, expert_count(down_EDI))
    wide_NM = _linear(x_TD[choices.tokens_N], gate_up_EMD, choices, fp8)
    return sum_choices(_linear(gated_silu(wide_NM), down_EDI, choices, fp8), choices.places_Tk, gates_Tk)


def _linear(rows_NI: Tensor, weight_EOI: ExpertWeight, choices: Choices, fp8: bool) -> Tensor:
    if fp8 or isinstance(weight_EOI, Fp8Blocks):
        return fp8_grouped_linear(rows_NI, weight_EOI, choices.ends_E)
    return grouped_linear(rows_NI, weight_EOI, choices.ends_E)


def _few_rows(
    x_TD: Tensor, gates_Tk: Tensor, experts_Tk: Tensor, gate_up_EMD: Tensor, down_EDI: Tensor, fp8: bool = False
) -> bool:
    if fp8 or not in_triton_serving(x_TD) or len(x_TD) > _FEW_TOKENS:
        return False
    aligned = down_EDI.shape[1] % _SIDE == 0 and down_EDI.shape[2] % _SIDE == 0
    return aligned and x_TD.dtype is not torch.float32 and x_TD.dtype is gate_up_EMD.dtype


def _any_rows(*_: object) -> bool:
    return True


routed_experts.backend("triton", takes=_few_rows)("headway.models.ops.triton.routed_experts:routed_experts")
routed_experts.backend("torch", takes=_any_rows, trains=True)(trained_experts)
