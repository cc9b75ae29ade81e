"""The way back from experts: every token's rows, weighted and summed."""

import torch
from torch import Tensor

from headway.models.ops.registry import Op, in_triton


@Op
def sum_choices(rows_ND: Tensor, places_Tk: Tensor, gates_Tk: Tensor | None = None) -> Tensor:
    """Sum rows `places` of every token, in the order of its choices, times its gates where these are given: (T, D)."""
    rows_TkD = rows_ND[places_Tk]
    return (rows_TkD if gates_Tk is None else rows_TkD * gates_Tk.unsqueeze(-1)).sum(1)


def _without_gradient(rows_ND: Tensor, *_: Tensor | None) -> bool:
    return in_triton(rows_ND) and not torch.is_grad_enabled()


sum_choices.backend("triton", takes=_without_gradient)("headway.models.ops.triton.sum_choices:sum_choices")
