"""The tensors behind the KV cache's blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.models import ops
from headway.models.configs.cache import KvCache
from headway.models.ops.attention.kv_cache import CachedHeads
from headway.models.ops.fp8.blocks import FP8


class KvStore:
    """Keys and values of all layers, (slots, kv heads, head size) each; slot = block x block size + offset.

    Where a layer's values are part of its keys, they are a view of these. `index_keys` are (slots, size), and empty in
    layers whose attention is not sparse. `dtype` is the model's; with `fp8`, layers that can keep theirs in FP8.
    """

    def __init__(
        self,
        caches: Sequence[KvCache],
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        fp8: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.caches = list(caches)
        slots = num_blocks * block_size

        def zeros(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros((slots, *shape), dtype=of, device=device)

        def heads(cache: KvCache, size: int) -> CachedHeads:
            if not (fp8 and cache.fits_fp8):
                return CachedHeads(zeros(cache.kv_heads, size))
            return CachedHeads(zeros(cache.kv_heads, size, of=FP8), zeros(cache.kv_heads, of=torch.float32))

        self.keys = [heads(cache, cache.head_dim) for cache in caches]
        self.values = [
            CachedHeads(keys.numbers[..., : cache.value_size])
            if cache.values_in_keys
            else heads(cache, cache.value_size)
            for cache, keys in zip(caches, self.keys, strict=True)
        ]
        self.index_keys = [zeros(cache.index_dim) for cache in caches]
        self.fp8 = any(keys.scales is not None for keys in self.keys)
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
            self.keys[layer].write(slots_T, k_TKD)
        else:
            ops.write_cache(k_TKD, v_TKD, slots_T, self.keys[layer], self.values[layer])

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that hold memory of their own, one row per slot each."""
        values = [values for values, inside in zip(self.values, self._values_in_keys, strict=True) if not inside]
        parts = [part for heads in (*self.keys, *values) for part in heads if part is not None]
        return parts + self.index_keys

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
