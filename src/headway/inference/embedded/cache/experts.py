"""The routed experts of every token in the cache, which a trainer replays."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.device.copies import HostCopy, to_device
from headway.models.configs.config import ModelConfig


class RecordedExperts:
    """A row of experts (layers, k) for each slot of the cache."""

    def __init__(self, config: ModelConfig, slots: int, device: torch.device) -> None:
        dtype = torch.uint8 if config.experts <= 256 and not config.dense_layers else torch.int16
        self.rows = torch.zeros((slots, config.layers, config.experts_per_token), dtype=dtype, device=device)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]  # torch has no types here

    def write(self, slots_T: Tensor, experts_TLk: Tensor) -> None:
        self.rows.index_copy_(0, slots_T, experts_TLk.to(self.rows.dtype))

    def read(self, slots: Sequence[NDArray[np.int64]], *, computed: bool) -> list[NDArray[np.integer]]:
        """Copy the rows of several sequences to the host at once. If they are `computed`, the step in flight is not
        waited for: the copy has a stream of its own."""
        stream = self._stream
        if stream is not None and not computed:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            picked = self.rows[to_device(np.concatenate(slots), self.rows.device)]
            copy = HostCopy(picked, torch.empty(picked.shape, dtype=picked.dtype, pin_memory=picked.is_cuda))
            rows = copy.wait().numpy()
        return [part.copy() for part in np.split(rows, np.cumsum([len(each) for each in slots])[:-1])]
