"""The tensors behind the KV cache's blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.models import ops
from headway.models.family import KvCache


class KvStore:
    """Keys and values of all layers, (slots, kv heads, head size) each; slot = block x block size + offset.

    Where a layer's values are part of its keys, they are a view of these. `index_keys` are (slots, size), and empty in
    layers whose attention is not sparse.
    """

    def __init__(
        self,
        caches: Sequence[KvCache],
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.caches = list(caches)
        slots = num_blocks * block_size

        def zeros(*shape: int) -> Tensor:
            return torch.zeros((slots, *shape), dtype=dtype, device=device)

        self.keys = [zeros(cache.kv_heads, cache.head_dim) for cache in caches]
        self.values = [
            keys[..., : cache.value_size] if cache.values_in_keys else zeros(cache.kv_heads, cache.value_size)
            for cache, keys in zip(caches, self.keys, strict=True)
        ]
        self.index_keys = [zeros(cache.index_dim) for cache in caches]
        self._values_in_keys = [cache.values_in_keys for cache in caches]
        own = [cache for cache in caches if cache.kv_heads]
        shapes = {(cache.kv_heads, cache.head_dim, cache.value_size, cache.values_in_keys) for cache in own}
        self.of_equal_heads = all((*shape[:2], shape[1], False) == shape for shape in shapes) and len(shapes) == 1
        """Keys and values of all layers that keep some have one size, as kernels that read blocks in place want."""
        self.sparse = any(cache.index_dim for cache in caches)
        """Attention of some layers is sparse."""

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Put tokens' keys and values into their slots."""
        if self._values_in_keys[layer]:
            self.keys[layer].index_copy_(0, slots_T, k_TKD)
        else:
            ops.write_cache(k_TKD, v_TKD, slots_T, self.keys[layer], self.values[layer])

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that hold memory of their own, one row per slot each."""
        tensors = list(self.keys) + list(self.index_keys)
        return tensors + [v for v, inside in zip(self.values, self._values_in_keys, strict=True) if not inside]

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
