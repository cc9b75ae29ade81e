"""States that stay where an engine keeps them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.models.ops.registry import in_triton_serving


class SlotStates(NamedTuple):
    """The rows `slots` of `tensor`, one for each sample. An operation that is given them as initial states writes the
    final ones in their place, and returns them as they are."""

    tensor: Tensor
    slots: Tensor

    def updated(self, run: Callable[[Tensor], tuple[Tensor, "State"]]) -> tuple[Tensor, "SlotStates"]:
        """Run an operation over tensors: its final states are written here."""
        out, after = run(self.tensor.index_select(0, self.slots))
        (states,) = as_tensors([after])
        self.tensor.index_copy_(0, self.slots, states.to(self.tensor.dtype))
        return out, self


State = Tensor | SlotStates
"""A state of each sample, (S, …)."""


def decodes_in_triton(
    x_T: Tensor, lengths: Sequence[int], states: State | None, dtype: torch.dtype | None = None
) -> bool:
    """Tell if the kernels take this: one token of each sample, from states that stay where they are, computed in
    `dtype` (None: that of `x`)."""
    if not isinstance(states, SlotStates) or len(lengths) != len(x_T):
        return False
    return (dtype or x_T.dtype) is states.tensor.dtype is torch.float32 and in_triton_serving(x_T)


def as_tensors(states: Sequence[State]) -> tuple[Tensor, ...]:
    """Final states of a recurrence that was given tensors, or none: it returns tensors."""
    assert not any(isinstance(state, SlotStates) for state in states)
    return tuple(state for state in states if isinstance(state, Tensor))
