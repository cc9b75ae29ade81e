"""The content of KV blocks as rows of bytes, to be copied elsewhere and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.inference.embedded.cache.store import KvStore


class BlockRows:
    """One row per block: keys and values of all layers. `extra` are more tensors with one row per slot (the routed
    experts of a token)."""

    def __init__(self, store: KvStore, extra: Sequence[Tensor] = ()) -> None:
        tensors = [tensor for tensor in [*store.tensors, *extra] if tensor.numel()]
        self._blocks = [tensor.view(store.num_blocks, -1).view(torch.uint8) for tensor in tensors]
        self._sizes = [tensor.shape[1] for tensor in self._blocks]
        self.device = store.device
        self.size = sum(self._sizes)
        """Bytes of a row."""

    def read(self, blocks: Sequence[int]) -> Tensor:
        """Copy blocks to new memory of the device: (blocks, bytes)."""
        places = torch.tensor(blocks, device=self.device)
        return torch.cat([tensor.index_select(0, places) for tensor in self._blocks], dim=1)

    def write(self, blocks: Sequence[int], rows: Tensor) -> None:
        """Overwrite blocks with `rows`, which may be in host memory."""
        places = torch.tensor(blocks, device=self.device)
        content = rows.to(self.device, non_blocking=True)
        for tensor, part in zip(self._blocks, torch.split(content, self._sizes, dim=1), strict=True):
            tensor.index_copy_(0, places, part)
