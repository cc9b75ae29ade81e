"""The gated MLPs of the experts that tokens chose, weighted and summed: a mixture of experts after its router."""

import torch
from torch import Tensor

from headway.models.ops.gated_silu import gated_silu
from headway.models.ops.grouped_linear import grouped_linear
from headway.models.ops.registry import Op, in_triton_serving

_FEW_TOKENS = 1024
"""Beyond, experts have so many rows each that products are bound by arithmetic, where sorted rows are better."""
_SIDE = 64
"""The Triton kernels' smallest tile of a weight."""


@Op
def routed_experts(x_TD: Tensor, gates_Tk: Tensor, experts_Tk: Tensor, gate_up_EMD: Tensor, down_EDI: Tensor) -> Tensor:
    """down(silu(gate) * up) of each of a token's `experts`, times its gate, summed over them: (T, D). M = 2 * I: gates
    above ups."""
    order_N, counts_E = sort_choices(experts_Tk, len(down_EDI))
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    rows_ND = x_TD[order_N // experts_Tk.shape[1]]
    hidden_NI = gated_silu(*grouped_linear(rows_ND, gate_up_EMD, ends_E).chunk(2, dim=-1))
    return sum_choices(grouped_linear(hidden_NI, down_EDI, ends_E), gates_Tk, order_N)


def sort_choices(experts_Tk: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Order choices (token t's j-th is number t * k + j) by expert, and count those of each expert."""
    flat_N = experts_Tk.flatten()
    return flat_N.argsort(stable=True), expert_counts(flat_N, experts)


def sum_choices(rows_ND: Tensor, gates_Tk: Tensor, order_N: Tensor) -> Tensor:
    """Sum every token's rows, weighted by their gates, in the order of its choices. Row i is of choice `order[i]`."""
    rows_TkD = rows_ND[inverse(order_N)].view(*gates_Tk.shape, -1)
    return (rows_TkD * gates_Tk.unsqueeze(-1)).sum(1)


def inverse(order_N: Tensor) -> Tensor:
    """The inverse of a permutation."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return inverse_N


def expert_counts(experts_N: Tensor, experts: int) -> Tensor:
    """Rows per expert, (E,). A one-hot sum and not bincount, which makes the host wait for a GPU."""
    return (experts_N.unsqueeze(-1) == torch.arange(experts, device=experts_N.device)).sum(0)


def _few_rows(x_TD: Tensor, gates_Tk: Tensor, experts_Tk: Tensor, gate_up_EMD: Tensor, down_EDI: Tensor) -> bool:
    aligned = down_EDI.shape[1] % _SIDE == 0 and down_EDI.shape[2] % _SIDE == 0
    half = x_TD.dtype is not torch.float32 and x_TD.dtype is gate_up_EMD.dtype
    return in_triton_serving(x_TD) and aligned and half and len(x_TD) <= _FEW_TOKENS


routed_experts.backend("triton", takes=_few_rows)("headway.models.ops.triton.routed_experts:routed_experts")
