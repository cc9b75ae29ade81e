"""The tensors behind the KV cache's blocks."""

import torch


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

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    @staticmethod
    def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * kv_heads * head_dim * dtype.itemsize
