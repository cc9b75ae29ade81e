"""The runner of an accelerator: attention in tiles over a table of blocks there, decode steps as graphs."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.draws import Drawer
from headway.inference.embedded.graphs import DecodeGraphs
from headway.inference.embedded.paged import Layout
from headway.inference.embedded.rows import Rows
from headway.inference.embedded.runner import Runner
from headway.inference.embedded.scheduler import Step
from headway.inference.embedded.store import KvStore
from headway.inference.embedded.tiles import TilePlan, make_tiles
from headway.models.decoder import DecoderLM
from headway.models.packed import PackedTokens

Ints = NDArray[np.int64]


class DeviceRunner(Runner):
    """Launches a step and does not wait for it. The last block of the store belongs to nobody: rows that fill up a
    recorded step write there."""

    depth = 1

    def __init__(self, model: DecoderLM, store: KvStore, rows: Rows) -> None:
        super().__init__(model, store, rows, ahead=True)
        max_running, max_blocks = rows.blocks.shape
        self._table = torch.zeros((max_running + 1, max_blocks), dtype=torch.int32, device=self.device)
        self._table[-1] = store.num_blocks - 1
        assert self._drawer.last is not None
        self._last = self._drawer.last
        self._graphs = DecodeGraphs(model, store, self._table, self._last, max_running, self._experts)

    def run(self, step: Step) -> tuple[Tensor, Ints, Ints, Ints]:
        if not self._decodes(step):
            return super().run(step)
        sequences, size = step.sequences, self.store.block_size
        self.rows.refresh(sequences)
        which = np.array([s.row for s in sequences], dtype=np.int64)
        positions = np.array([s.computed for s in sequences], dtype=np.int64)
        tokens = np.array([-1 if s.ahead else s.tokens[s.computed] for s in sequences], dtype=np.int64)
        slots = self.rows.blocks[which, positions // size] * size + positions % size
        return self._graphs.run(which, tokens, positions, slots), np.arange(len(which)), which, positions + 1

    def _decodes(self, step: Step) -> bool:
        """Whether every sequence runs its last token and nothing asks for more than that. Not those that were admitted
        just now: their blocks are not in the table yet."""
        if step.admitted or max(step.counts) > 1:
            return False
        return not any(s.pending > 1 or s.adapter is not None or s.wants_prompt_logprobs for s in step.sequences)

    def _make_drawer(self, ahead: bool) -> Drawer:
        return Drawer(self.rows, self.device, keep=True, kernels=True)

    def _forward(self, tokens: list[int], layout: Layout) -> Tensor:
        size, positions, counts = self.store.block_size, layout.positions_T, layout.counts
        rows_T = np.repeat(layout.rows, counts)
        slots = layout.blocks[rows_T, positions // size] * size + positions % size
        adapters = np.repeat(self.rows.adapter[layout.rows], counts)
        sent = np.stack([np.array(tokens, dtype=np.int64), rows_T, positions, slots, adapters])
        tokens_T, rows_T_sent, positions_T, slots_T, adapters_T = self._to_device(sent)
        tokens_T = torch.where(tokens_T < 0, self._last[rows_T_sent], tokens_T)
        self._show_blocks(layout)
        config = self.model.config
        tiles = make_tiles(layout, self._heads_per_kv, config.kv_heads, self.device)
        plan = TilePlan(self.store, self._table, slots_T, tiles)
        adapted = adapters_T if (adapters >= 0).any() else None
        out = self.model(PackedTokens(tokens_T, positions_T, plan, adapters_T=adapted))
        if self._experts is not None and out.routed_experts_TLk is not None:
            self._experts.index_copy_(0, slots_T, out.routed_experts_TLk.to(self._experts.dtype))
        hidden: Tensor = out.hidden_TD
        return hidden

    def _show_blocks(self, layout: Layout) -> None:
        """Put the blocks of a step's sequences into the table on the device."""
        used = -(-int((layout.starts + layout.counts).max()) // self.store.block_size)
        blocks = self._to_device(layout.blocks[layout.rows, :used].astype(np.int32))
        self._table[:, :used].index_copy_(0, self._to_device(layout.rows), blocks)
