"""The runner of an accelerator: it launches steps and does not wait for them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.attention.tiles import KeyCutter, make_tiles, prompt_queries
from headway.inference.embedded.cache.states import StateStore
from headway.inference.embedded.cache.store import KvStore
from headway.inference.embedded.device.copies import MOST_REPEATS, to_device
from headway.inference.embedded.device.graphs import Graphs
from headway.inference.embedded.inputs.input_batch import InputBatch
from headway.inference.embedded.inputs.layout import StepLayout
from headway.inference.embedded.running.captured import CapturedSteps
from headway.inference.embedded.running.device_pass import DevicePass
from headway.inference.embedded.running.runner import Runner
from headway.inference.embedded.sampling.drawer import Drawer
from headway.inference.embedded.scheduling.scheduler import Step
from headway.inference.embedded.scheduling.sequence import Sequence
from headway.models.decoder import DecoderLM
from headway.models.ops.experts.grouped_linear import grouped_at_once

Ints = NDArray[np.int64]


class DeviceRunner(Runner):
    """Decode steps and small steps with prompts replay CUDA graphs; larger ones, and those with images, run eagerly.
    The last block of the store is padding."""

    depth = 1
    most_repeats = MOST_REPEATS

    def __init__(self, model: DecoderLM, store: KvStore, rows: InputBatch, states: StateStore | None = None) -> None:
        super().__init__(model, store, rows, ahead=True, states=states)
        if states is not None:
            self.most_repeats = 1  # states are saved between two steps
        assert self._drawer.last is not None
        max_running, max_blocks = rows.blocks.shape
        self._pass = DevicePass(model, store, max_blocks, self._drawer.last, self._experts, states)
        if self.images is not None:
            self._pass.shift = torch.zeros_like(self._drawer.last)
        self.graphs = Graphs(enabled=self.device.type == "cuda" and _never_waits(model))
        self._cutter = KeyCutter.over(store)
        self._captured = CapturedSteps(self._pass, self.graphs, max_running)

    def warm_up(self) -> None:
        """Compile kernels and capture graphs on padding before the first request. Raise whatever fails."""
        with torch.inference_mode():
            logits = self._captured.capture_graphs()
            self._drawer.draw(logits, np.array([0]), np.array([1]))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def enter(self, sequence: Sequence, adapter: int) -> None:
        super().enter(sequence, adapter)
        if self.images is not None and self._pass.shift is not None:
            self._pass.shift[sequence.row].fill_(self.images.shift(sequence.row))

    def _make_drawer(self, ahead: bool) -> Drawer:
        return Drawer(self.rows, self.device, keep=True, kernels=True)

    def _logits(self, step: Step, tokens: list[int], layout: StepLayout, drawing: Ints) -> Tensor:
        self._show_shared(step, layout)
        if self.rows.scored[layout.rows].any() or self._shows(layout):
            return super()._logits(step, tokens, layout, drawing)
        if len(tokens) == len(drawing):
            slots, adapters = self._slots(layout.rows, layout), self._adapters(layout.rows)
            return self._captured.decode(np.array(tokens), layout.rows, layout.positions_T, slots, adapters)
        if len(drawing) and self._captured.takes(layout):
            rows_T = np.repeat(layout.rows, layout.counts)
            slots, adapters = self._slots(rows_T, layout), self._adapters(rows_T)
            return self._captured.mixed(np.array(tokens), slots, layout, drawing, adapters)
        return super()._logits(step, tokens, layout, drawing)

    def _forward(self, tokens: list[int], layout: StepLayout) -> Tensor:
        rows_T = np.repeat(layout.rows, layout.counts)
        fields = np.stack([np.array(tokens), rows_T, layout.positions_T, self._slots(rows_T, layout)])
        tokens_T, rows_sent_T, positions_T, slots_T = self._to_device(fields)
        queries = prompt_queries(self._heads_per_kv, self.store.dtype)
        tiles = make_tiles(layout, queries, self._cutter, self.device)
        adapters = self._adapters(rows_T)
        adapters_T = None if adapters is None else self._to_device(adapters)
        images = self.images.inputs(layout) if self.images is not None and self._shows(layout) else None
        states = None
        if self.states is not None:
            states = self._pass.states_of(self._to_device(layout.rows), layout.counts.tolist())
        return self._pass.hidden(
            tokens_T, rows_sent_T, positions_T, slots_T, tiles, adapters_T=adapters_T, images=images, states=states
        )

    def _shows(self, layout: StepLayout) -> bool:
        return self.images is not None and self.images.shows(layout)

    def _to_device(self, values: NDArray[np.integer]) -> Tensor:
        return to_device(values, self.device)

    def _slots(self, rows_T: Ints, layout: StepLayout) -> Ints:
        size, positions = self.store.block_size, layout.positions_T
        slots: Ints = layout.blocks[rows_T, positions // size] * size + positions % size
        return slots

    def _adapters(self, rows_T: Ints) -> Ints | None:
        """Look up tokens' slots in the adapter bank; None if all use the base model."""
        adapters = self.rows.adapter[rows_T]
        return adapters if (adapters >= 0).any() else None

    def _show_shared(self, step: Step, layout: StepLayout) -> None:
        """Copy blocks of cached prefixes to the block table on the device; a step adds those it fills itself."""
        rows = np.array([s.row for s in step.admitted if s.computed], dtype=np.int64)
        if len(rows):
            used = -(-max(s.computed for s in step.admitted) // self.store.block_size)
            sent = self._to_device(np.column_stack([rows, layout.blocks[rows, :used]]))
            self._pass.table[:, :used].index_copy_(0, sent[:, 0], sent[:, 1:].int())


def _never_waits(model: DecoderLM) -> bool:
    """Tell if a forward pass never synchronizes with the host, as capture demands."""
    weight = model.head_weight()
    return not model.config.experts or grouped_at_once(weight.dtype, model.config.expert_width, model.config.width)
