"""The recurrent states of sequences: a slot for each row of the input batch, then slots for snapshots."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headway.inference.embedded.running.copies import to_device
from headway.inference.embedded.running.dense_cache import DenseCache
from headway.inference.embedded.running.paged import PagedPlan, StepLayout
from headway.inference.embedded.running.store import KvStore
from headway.models.packed import Recurrence, States
from headway.models.recurrent import RecurrentState


class StateStore:
    """States of the layers that have one, by layer: tensors with a row per slot."""

    def __init__(self, states: Mapping[int, RecurrentState], slots: int, device: torch.device) -> None:
        self.device = device
        self._layers: dict[int, States] = {
            layer: tuple(torch.zeros((slots, *size), device=device) for size in (state.tail, state.matrix))
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

    def read(self, layer: int, slots: Tensor) -> States:
        return tuple(tensor.index_select(0, slots) for tensor in self._layers[layer])

    def write(self, layer: int, slots: Tensor, states: States) -> None:
        for tensor, state in zip(self._layers[layer], states, strict=True):
            tensor.index_copy_(0, slots, state.to(tensor.dtype))

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensors in self._layers.values() for tensor in tensors]


class RecurrentPlan(PagedPlan):
    """A paged plan of a model with recurrent layers: a step takes up each sequence's state, and leaves the new one."""

    def __init__(
        self, states: StateStore, store: KvStore, layout: StepLayout, heads_per_kv: int, dense: DenseCache | None
    ) -> None:
        super().__init__(store, layout, heads_per_kv, dense)
        self._states = states
        self._rows = to_device(layout.rows, store.device)
        self._lengths: list[int] = layout.counts.tolist()

    def recur(self, layer: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        out, after = recurrence(inputs, self._lengths, self._states.read(layer, self._rows))
        self._states.write(layer, self._rows, after)
        return out
