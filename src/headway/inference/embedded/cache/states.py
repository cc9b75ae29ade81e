"""The recurrent states of sequences: a slot for each row of the input batch, then slots for snapshots, and one for what
only fills a step up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.models.configs.recurrent import RecurrentState
from headway.models.ops.recurrent.slots import SlotStates
from headway.models.packed import Recurrence


class StateStore:
    """States of the layers that have one, by layer: tensors with a row per slot. The last is number `slots`."""

    def __init__(self, states: Mapping[int, RecurrentState], slots: int, device: torch.device) -> None:
        self.device, self.padding = device, slots
        self._layers = {
            layer: (
                torch.zeros((slots + 1, *state.tail), device=device),
                torch.zeros((slots + 1, *state.matrix), device=device),
            )
            for layer, state in states.items()
        }

    def enter(self, row: int, snapshot: int | None) -> None:
        """Start a sequence in `row`: from a snapshot's slot, or from the beginning."""
        for tensor in self._tensors():
            if snapshot is None:
                tensor[row].zero_()
            else:
                tensor[row].copy_(tensor[snapshot])

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states from the first slot of each pair to the second."""
        sources, targets = torch.tensor(pairs, device=self.device).unbind(1)
        for tensor in self._tensors():
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def recur(
        self, layer: int, slots: Tensor, recurrence: Recurrence, inputs: Sequence[Tensor], lengths: Sequence[int]
    ) -> Tensor:
        """Run a recurrence from the states in `slots`, and leave the new ones there."""
        out, after = recurrence(inputs, lengths, tuple(SlotStates(tensor, slots) for tensor in self._layers[layer]))
        assert all(isinstance(state, SlotStates) for state in after)
        return out

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensors in self._layers.values() for tensor in tensors]


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states of a step: its sequences, of `lengths`, take theirs up from their `slots`, and leave the new
    ones there."""

    store: StateStore
    slots: Tensor
    lengths: Sequence[int]

    def recur(self, layer: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        return self.store.recur(layer, self.slots, recurrence, inputs, self.lengths)
