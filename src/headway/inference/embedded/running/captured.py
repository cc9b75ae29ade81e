"""Steps with inputs at fixed addresses on the device, so that CUDA graphs capture them: decoding, and decoding mixed
with prompts.

Both are padded to a captured size. Padding has a row and a slot of its own, and no tile.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.attention.tiles import KeyCutter, cut_queries, prompt_queries
from headway.inference.embedded.device.copies import InputBuffers
from headway.inference.embedded.device.graphs import Graphs, capture_sizes
from headway.inference.embedded.inputs.layout import StepLayout
from headway.inference.embedded.running.device_pass import DevicePass
from headway.models.adapter_rows.bank import AdapterBank
from headway.models.ops.attention.paged import Tiles

Ints = NDArray[np.int64]

_MIXED = (*range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256))
"""Captured token counts of steps with prompts: close together, since in a run nearly every step has a prompt, and
padding is computed. Larger steps run eagerly: the device hides their launches."""
_PROMPTS = 256
"""Most prompts in such a step; short ones, mostly cached, come many at a time."""
_TOKENS, _PARTS, _TILES = 5, 8, 4
"""Numbers per token: id, row, position, slot, adapter; per part of a decoding sequence; per tile of a prompt."""


class CapturedSteps:
    """Captured steps of up to `capacity` sequences; their float32 logits are valid until the next step.

    A token below 0 stands for its row's last one on the device. `adapters` are the tokens' slots in the bank, None if
    no token has one.
    """

    def __init__(self, passes: DevicePass, graphs: Graphs, capacity: int) -> None:
        self._pass = passes
        self._graphs = graphs
        self._bank: AdapterBank | None = None
        self._adapted = Graphs(enabled=False)
        self._sizes = capture_sizes(capacity)
        config = passes.model.config
        self._cutter = KeyCutter.over(passes.store)
        head = passes.model.head_weight()
        self._queries = prompt_queries(config.heads // config.kv_heads, head.dtype)
        device = passes.table.device
        room = self._cutter.room
        self._arrived = self._cutter.arrived(device)
        self._decoding = InputBuffers(_TOKENS + _PARTS, capacity + room, device)
        self._mixed = InputBuffers(_TOKENS + _PARTS + _TILES + 1, max(_MIXED) + room, device)
        self._logits = torch.empty((capacity, len(head)), dtype=torch.float32, device=device)

    def decode(self, tokens: Ints, rows: Ints, positions: Ints, slots: Ints, adapters: Ints | None = None) -> Tensor:
        """Run one token of each sequence."""
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        fields = self._decoding.next()
        self._fill(fields[:_TOKENS], (tokens, rows, positions, slots, adapters), size)
        # Padding, too, attends: what it has must not be NaN.
        _, padded_rows, padded_positions, _, _ = fields[:_TOKENS, :size]
        self._fill_parts(fields[_TOKENS:], padded_rows, np.arange(size), padded_positions)
        self._decoding.send()
        adapted = adapters is not None
        self._graphs_of(adapted).run(("decode", size), partial(self._decode, size, adapted))
        return self._logits[: len(rows)]

    def takes(self, layout: StepLayout) -> bool:
        """Tell if a step with prompts is small enough for `mixed`. Recurrent layers cut prompts as they come."""
        prompts = layout.counts[layout.counts > 1]
        return self._pass.states is None and len(layout.positions_T) <= _MIXED[-1] and len(prompts) <= _PROMPTS

    def mixed(
        self, tokens: Ints, slots: Ints, layout: StepLayout, drawing: Ints, adapters: Ints | None = None
    ) -> Tensor:
        """Run any number of tokens of each sequence; return logits of the last token of those at `drawing`."""
        size = _MIXED[bisect_left(_MIXED, len(tokens))]
        ends = np.cumsum(layout.counts)
        firsts = ends - layout.counts
        single = layout.counts == 1
        prompts = cut_queries(layout, firsts, np.flatnonzero(~single), self._queries)
        fields = self._mixed.next()
        rows_T = np.repeat(layout.rows, layout.counts)
        self._fill(fields[:_TOKENS], (tokens, rows_T, layout.positions_T, slots, adapters), size)
        parts, others = fields[_TOKENS : _TOKENS + _PARTS], fields[_TOKENS + _PARTS :]
        self._fill_parts(parts, layout.rows[single], firsts[single], layout.starts[single])
        others[:] = 0
        others[:_TILES, : prompts.shape[1]] = prompts
        others[_TILES, : len(drawing)] = ends[drawing] - 1
        self._mixed.send()
        adapted = adapters is not None
        self._graphs_of(adapted).run(("mixed", size), partial(self._mix, size, adapted))
        return self._logits[: len(drawing)]

    def capture_graphs(self) -> Tensor:
        """Capture all sizes, a few hundredths of a second each, so that no request waits. Return logits of one row."""
        fields = self._mixed.next()
        fields[:] = 0
        self._fill(fields[:_TOKENS], [np.array([], dtype=np.int64)] * _TOKENS, _MIXED[-1])
        self._mixed.send()
        for size in _MIXED if self._pass.states is None else ():
            self._graphs.run(("mixed", size), partial(self._mix, size, False))
        padding = np.array([[0], [self._pass.padding_row], [0], [self._pass.padding_slot]])
        for size in reversed(self._sizes):
            logits = self.decode(*np.repeat(padding, size, axis=1))
        return logits

    def _graphs_of(self, adapted: bool) -> Graphs:
        """Choose the graphs; those with adapters hold addresses of one bank and are dropped with it."""
        if not adapted:
            return self._graphs
        if self._bank is not self._pass.model.adapters:
            self._bank = self._pass.model.adapters
            self._adapted = Graphs(enabled=self._graphs.enabled)
        return self._adapted

    def _fill(self, fields: Ints, values: Sequence[Ints | None], size: int) -> None:
        """Write the values, then padding up to `size`: tokens that differ, or else a few experts would get them all."""
        tokens = np.arange(size) % self._logits.shape[1]
        padding = (tokens, self._pass.padding_row, 0, self._pass.padding_slot, -1)
        for field, value, filler in zip(fields, values, padding, strict=True):
            field[:size] = filler
            if value is not None:
                field[: len(value)] = value

    def _fill_parts(self, fields: Ints, rows: Ints, tokens: Ints, positions: Ints) -> None:
        """Write the tiles of decoding sequences, and empty ones behind them."""
        fields[:] = 0
        if len(rows):
            parts = self._cutter.cut(rows, tokens, positions)
            fields[:, : parts.shape[1]] = parts

    def _decode(self, size: int, adapted: bool) -> None:
        sent = self._decoding.on_device
        tokens, rows, positions, slots, adapters = sent[:_TOKENS, :size]
        tiles = Tiles.split(sent[_TOKENS:, : size + self._cutter.room], self._arrived)
        gate = adapters if adapted else None
        states = self._pass.states_of(rows, [1] * size)
        self._head(self._pass.hidden(tokens, rows, positions, slots, [tiles], adapters_T=gate, states=states))

    def _mix(self, size: int, adapted: bool) -> None:
        sent, most = self._mixed.on_device, min(size, len(self._logits))
        tokens, rows, positions, slots, adapters = sent[:_TOKENS, :size]
        parts, others = sent[_TOKENS : _TOKENS + _PARTS], sent[_TOKENS + _PARTS :]
        decoding = Tiles.split(parts[:, : most + self._cutter.room], self._arrived)
        # Every prompt has two tokens at least, and a last tile that may not be full.
        tiles = size // self._queries + min(_PROMPTS, size // 2)
        prompts = Tiles.of(others[:_TILES, :tiles], self._queries)
        gate = adapters if adapted else None
        hidden = self._pass.hidden(tokens, rows, positions, slots, [decoding, prompts], adapters_T=gate, padded=True)
        self._head(hidden[others[_TILES, :most]])

    def _head(self, hidden_ND: Tensor) -> None:
        self._pass.model.logits(hidden_ND, out=self._logits[: len(hidden_ND)])
