"""Decode steps as CUDA graphs: one per size, recorded at its first use, replayed with new inputs at old addresses."""

import logging
from bisect import bisect_left
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.staging import Staging
from headway.inference.embedded.store import KvStore
from headway.inference.embedded.tiles import TilePlan, decode_splits
from headway.models.decoder import DecoderLM
from headway.models.kernels.paged_attention import Tiles
from headway.models.packed import PackedTokens

logger = logging.getLogger("headway.inference")
Ints = NDArray[np.int64]


def ladder(most: int) -> list[int]:
    """The sizes that are recorded: few, and none more than a third larger than what it is used for (from 3 up)."""
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, 129, 16), *range(160, 257, 32), *range(320, 513, 64)]
    sizes += range(640, most + 128, 128)
    return [size for size in sizes if size < most] + [most]


class DecodeGraphs:
    """Runs one token of each of up to `capacity` sequences, from their last tokens to logits.

    Rows that fill a step up to a recorded size belong to a sequence of nobody's, in the last row of the table and
    the last block of the store. `experts` keeps the experts of all slots, None where the model has none.
    """

    def __init__(
        self, model: DecoderLM, store: KvStore, table: Tensor, last: Tensor, capacity: int, experts: Tensor | None
    ) -> None:
        self._model = model
        self._store = store
        self._table = table
        self._last = last
        self._experts = experts
        self._sizes = ladder(capacity)
        device = table.device
        self._staging = Staging(4, capacity, device)
        self._places = torch.arange(capacity, device=device)
        self._ones = torch.ones(capacity, dtype=torch.int64, device=device)
        head = model.head_weight()
        self._logits = torch.empty((capacity, len(head)), dtype=head.dtype, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._records = device.type == "cuda"

    def run(self, rows: Ints, tokens: Ints, positions: Ints, slots: Ints) -> Tensor:
        """Logits (N, vocab) in the dtype of the weights, valid until the next run. A token below 0 stands for the
        row's last one on the device."""
        count = len(rows)
        size = self._sizes[bisect_left(self._sizes, count)]
        fields = self._staging.next()
        for field, values in zip(fields, (rows, tokens, positions, slots), strict=True):
            field[:count] = values
        scratch = (self._store.num_blocks - 1) * self._store.block_size
        fields[:, count:size] = np.array([[len(self._table) - 1], [0], [0], [scratch]])
        self._staging.send()
        graph = self._graphs.get(size)
        if graph is None and self._records:
            graph = self._record(size)
        if graph is None:
            self._forward(size)
        else:
            graph.replay()
        return self._logits[:count]

    def _record(self, size: int) -> torch.cuda.CUDAGraph | None:
        """None, and no more attempts, where that fails: then steps run without graphs."""
        try:
            # Compiles kernels and warms libraries up, which must not happen in a recording; a step can be run twice.
            self._forward(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._forward(size)
        except Exception:
            logger.exception("a decode step of %d sequences can't be recorded; serving without CUDA graphs", size)
            self._records = False
            return None
        self._pool = graph.pool()
        self._graphs[size] = graph
        return graph

    def _forward(self, size: int) -> None:
        rows, tokens, positions, slots = self._staging.on_device[:, :size]
        tokens = torch.where(tokens < 0, self._last[rows], tokens)
        blocks = self._store.block_size
        self._table.view(-1)[rows * self._table.shape[1] + positions // blocks] = (slots // blocks).int()
        splits = decode_splits(size, self._model.config.kv_heads)
        tiles = Tiles(rows, self._places[:size], positions, self._ones[:size], 1, splits)
        out = self._model(PackedTokens(tokens, positions, TilePlan(self._store, self._table, slots, [tiles])))
        if self._experts is not None and out.routed_experts_TLk is not None:
            self._experts.index_copy_(0, slots, out.routed_experts_TLk.to(self._experts.dtype))
        torch.mm(out.hidden_TD, self._model.head_weight().t(), out=self._logits[:size])
