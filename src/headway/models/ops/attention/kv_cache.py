"""Writing keys and values to a paged cache: slots of (kv heads, head size), slot = block x block size + offset."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.models.ops.fp8.blocks import FP8, quantize_vectors
from headway.models.ops.native.library import dense_rows, kernels
from headway.models.ops.qk_norm_rope import Norms, qk_norm_rope, rotates_whole_heads
from headway.models.ops.registry import Op, in_c, in_triton


class CachedHeads(NamedTuple):
    """Keys, or values, of a layer by slot: `numbers` (slots, kv heads, head size). In FP8 every head of a slot has a
    scale, (slots, kv heads)."""

    numbers: Tensor
    scales: Tensor | None = None

    def write(self, slots_T: Tensor, x_TKD: Tensor) -> None:
        """Put a token's heads into its slot."""
        if self.scales is None:
            self.numbers.index_copy_(0, slots_T, x_TKD)
            return
        values, scales = quantize_vectors(x_TKD)
        # As bytes: torch has few operations on FP8.
        self.numbers.view(torch.uint8).index_copy_(0, slots_T, values.view(torch.uint8))
        self.scales.index_copy_(0, slots_T, scales)

    def read(self, slots_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy the heads of slots, (T, K, D) in `dtype`, which is that of a cache not in FP8."""
        if self.scales is None:
            return self.numbers.index_select(0, slots_T)
        values = self.numbers.view(torch.uint8).index_select(0, slots_T).view(FP8)
        return (values.float() * self.scales.index_select(0, slots_T).unsqueeze(-1)).to(dtype)

    def by_blocks(self, block_size: int) -> "CachedHeads":
        """The same memory as slots of whole blocks: (blocks, block size x kv heads, head size)."""
        _, kv_heads, size = self.numbers.shape
        scales = None if self.scales is None else self.scales.view(-1, block_size * kv_heads)
        return CachedHeads(self.numbers.view(-1, block_size * kv_heads, size), scales)


@Op
def write_cache(k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor, keys: CachedHeads, values: CachedHeads) -> None:
    """Token t's keys and values go to slot `slots[t]`."""
    keys.write(slots_T, k_TKD)
    values.write(slots_T, v_TKD)


@Op
def qk_norm_rope_to_cache(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    norms: Norms | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots_T: Tensor,
    keys: CachedHeads,
    values: CachedHeads,
) -> Tensor:
    """`qk_norm_rope`, whose keys go to the cache with the values, and whose queries are returned."""
    q_THD, k_TKD = qk_norm_rope(q_THD, k_TKD, norms, eps, cos, sin)
    write_cache(k_TKD, v_TKD, slots_T, keys, values)
    return q_THD


def _alike_in_c(k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor, keys: CachedHeads, *_: Any) -> bool:
    return in_c(k_TKD) and k_TKD.shape == v_TKD.shape and keys.scales is None


@write_cache.backend("c", takes=_alike_in_c)
def _write_cache_c(k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor, keys: CachedHeads, values: CachedHeads) -> None:
    k_TKD, v_TKD = dense_rows(k_TKD), dense_rows(v_TKD)
    tokens, kv_heads, size = k_TKD.shape
    kernels().write_cache(
        k_TKD.data_ptr(), k_TKD.stride(0), v_TKD.data_ptr(), v_TKD.stride(0), slots_T.data_ptr(), tokens,
        kv_heads * size, keys.numbers.data_ptr(), values.numbers.data_ptr(),
    )  # fmt: skip


def _whole_in_triton(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, norms: Norms | None, eps: float, cos: Tensor, *_: Any
) -> bool:
    return in_triton(q_THD) and rotates_whole_heads(q_THD, cos)


qk_norm_rope_to_cache.backend("triton", takes=_whole_in_triton)(
    "headway.models.ops.triton.kv_cache:qk_norm_rope_to_cache"
)
