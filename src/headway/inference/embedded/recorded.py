"""Steps whose inputs lie at fixed addresses on the device, so that they can be recorded: decoding, with and without
prompts beside it.

Both fill up to a size from a ladder. What fills them up belongs to nobody: its row, its slot, no tile.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.device_pass import DevicePass
from headway.inference.embedded.graphs import Graphs, ladder
from headway.inference.embedded.paged import Layout
from headway.inference.embedded.staging import Staging
from headway.inference.embedded.tiles import cut, decode_splits, prompt_queries
from headway.models.kernels.paged_attention import Tiles

Ints = NDArray[np.int64]

_MIXED = (128, 256, 512, 1024)
"""Tokens of steps with prompts that are recorded. Larger ones are worth the host's time to launch them."""
_PROMPTS = 32
"""Prompts in such a step, at most."""


class RecordedSteps:
    """Logits of up to `capacity` sequences per step, in the dtype of the weights, valid until the next step."""

    def __init__(self, passes: DevicePass, graphs: Graphs, capacity: int) -> None:
        self._pass = passes
        self._graphs = graphs
        self._sizes = ladder(capacity)
        config = passes.model.config
        self._kv_heads = config.kv_heads
        self._queries = prompt_queries(config.heads // config.kv_heads)
        device = passes.table.device
        self._decoding = Staging(4, capacity, device)
        self._mixed = Staging(13, max(_MIXED), device)
        self._places = torch.arange(capacity, device=device)
        self._ones = torch.ones(capacity, dtype=torch.int64, device=device)
        head = passes.model.head_weight()
        self._logits = torch.empty((capacity, len(head)), dtype=head.dtype, device=device)

    def decode(self, tokens: Ints, rows: Ints, positions: Ints, slots: Ints) -> Tensor:
        """One token of each sequence; a token below 0 is the row's last one on the device."""
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        fields = self._decoding.next()
        self._fill(fields, (tokens, rows, positions, slots), size)
        self._decoding.send()
        self._graphs.run(("decode", size), partial(self._decode, size))
        return self._logits[: len(rows)]

    def rehearse(self) -> Tensor:
        """Record what most steps will be: decoding at the most sequences, all sizes with prompts. Logits of one row."""
        fields = self._mixed.next()
        fields[:] = 0
        self._fill(fields[:4], [np.array([], dtype=np.int64)] * 4, _MIXED[-1])
        self._mixed.send()
        for size in _MIXED:
            self._graphs.run(("mixed", size), partial(self._mix, size))
        nobody = np.array([[0], [self._pass.nobodys_row], [0], [self._pass.nobodys_slot]])
        self.decode(*np.repeat(nobody, self._sizes[-1], axis=1))
        return self.decode(*nobody)

    def takes(self, layout: Layout) -> bool:
        """Whether a step with prompts is small enough for `mixed`."""
        prompts = layout.counts[layout.counts > 1]
        return len(layout.positions_T) <= _MIXED[-1] and len(prompts) <= _PROMPTS

    def mixed(self, tokens: Ints, slots: Ints, layout: Layout, drawing: Ints) -> Tensor:
        """Any number of tokens of each sequence; logits of the last token of those at `drawing`."""
        size = _MIXED[bisect_left(_MIXED, len(tokens))]
        ends = np.cumsum(layout.counts)
        firsts = ends - layout.counts
        single = layout.counts == 1
        decoding = np.stack([layout.rows, firsts, layout.starts, layout.counts])[:, single]
        prompts = cut(layout, firsts, np.flatnonzero(~single), self._queries)
        fields = self._mixed.next()
        self._fill(fields[:4], (tokens, np.repeat(layout.rows, layout.counts), layout.positions_T, slots), size)
        fields[4:] = 0
        fields[4:8, : decoding.shape[1]] = decoding
        fields[8:12, : prompts.shape[1]] = prompts
        fields[12, : len(drawing)] = ends[drawing] - 1
        self._mixed.send()
        self._graphs.run(("mixed", size), partial(self._mix, size))
        return self._logits[: len(drawing)]

    def _fill(self, fields: Ints, values: Sequence[Ints], size: int) -> None:
        count = len(values[0])
        for field, value in zip(fields, values, strict=True):
            field[:count] = value
        fields[:, count:size] = np.array([[0], [self._pass.nobodys_row], [0], [self._pass.nobodys_slot]])

    def _decode(self, size: int) -> None:
        tokens, rows, positions, slots = self._decoding.on_device[:, :size]
        splits = decode_splits(size, self._kv_heads)
        tiles = Tiles(rows, self._places[:size], positions, self._ones[:size], 1, splits)
        self._head(self._pass.hidden(tokens, rows, positions, slots, [tiles]))

    def _mix(self, size: int) -> None:
        sent = self._mixed.on_device
        tokens, rows, positions, slots = sent[:4, :size]
        most = min(size, len(self._logits))
        decoding = Tiles.of(sent[4:8, :most], 1, decode_splits(most, self._kv_heads))
        prompts = Tiles.of(sent[8:12, : size // self._queries + _PROMPTS], self._queries)
        hidden = self._pass.hidden(tokens, rows, positions, slots, [decoding, prompts], padded=True)
        self._head(hidden[sent[12, :most]])

    def _head(self, hidden_ND: Tensor) -> None:
        torch.mm(hidden_ND, self._pass.model.head_weight().t(), out=self._logits[: len(hidden_ND)])
