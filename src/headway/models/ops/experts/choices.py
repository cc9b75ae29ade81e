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
    experts_N: Tensor
    """The expert of each row."""

    @classmethod
    def of(cls, experts_Tk: Tensor, experts: int) -> Self:
        # Small keys are sorted in fewer passes.
        sorted_N, order_N = experts_Tk.flatten().to(torch.int16).sort(stable=True)
        numbers_E = torch.arange(experts, dtype=torch.int16, device=sorted_N.device)
        ends_E = torch.searchsorted(sorted_N, numbers_E, right=True, out_int32=True)
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        places_Tk = inverse(order_N).view(experts_Tk.shape)
        return cls(order_N, order_N // experts_Tk.shape[1], counts_E, ends_E, places_Tk, sorted_N)


def inverse(order_N: Tensor) -> Tensor:
    """The inverse of a permutation."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return inverse_N


def expert_counts(experts_N: Tensor, experts: int) -> Tensor:
    """Rows per expert, (E,); those of expert -1 don't count. Not by bincount, which makes the host wait for a GPU."""
    numbers_N = experts_N.long() + 1
    return numbers_N.new_zeros(experts + 1).scatter_add_(0, numbers_N, torch.ones_like(numbers_N))[1:]
