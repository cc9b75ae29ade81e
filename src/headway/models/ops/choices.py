"""The experts that tokens chose, sorted, so that each expert's rows lie together."""

from typing import NamedTuple, Self

import torch
from torch import Tensor


class Choices(NamedTuple):
    """Token t's j-th choice is number t * k + j. Rows are choices in the order of their experts, N = T * k of them."""

    order_N: Tensor
    """The choice of each row."""
    tokens_N: Tensor
    """The token of each row."""
    counts_E: Tensor
    """Rows of each expert."""
    ends_E: Tensor
    """Where they end."""
    places_Tk: Tensor
    """The row of each choice."""

    @classmethod
    def of(cls, experts_Tk: Tensor, experts: int) -> Self:
        flat_N = experts_Tk.flatten()
        # Small keys are sorted in fewer passes.
        order_N = flat_N.to(torch.int16).argsort(stable=True)
        counts_E = expert_counts(flat_N, experts)
        ends_E, places_Tk = counts_E.cumsum(0, dtype=torch.int32), inverse(order_N).view(experts_Tk.shape)
        return cls(order_N, order_N // experts_Tk.shape[1], counts_E, ends_E, places_Tk)


def inverse(order_N: Tensor) -> Tensor:
    """The inverse of a permutation."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return inverse_N


def expert_counts(experts_N: Tensor, experts: int) -> Tensor:
    """Rows per expert, (E,). A one-hot sum and not bincount, which makes the host wait for a GPU."""
    return (experts_N.unsqueeze(-1) == torch.arange(experts, device=experts_N.device)).sum(0)
