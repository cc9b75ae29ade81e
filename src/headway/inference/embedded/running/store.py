"""The tensors behind the KV cache's blocks."""

import torch
from torch import Tensor

from headway.models import ops


class KvStore:
    """Keys and values of all layers, (slots, kv heads, head dim) each; slot = block x block size + offset."""

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (layers, num_blocks * block_size, kv_heads, head_dim)
        self.device = device
        self.keys = list(torch.zeros(shape, dtype=dtype, device=device))
        self.values = list(torch.zeros(shape, dtype=dtype, device=device))

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Put tokens' keys and values into their slots."""
        ops.write_cache(k_TKD, v_TKD, slots_T, self.keys[layer], self.values[layer])

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))
