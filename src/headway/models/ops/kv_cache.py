"""Writing keys and values to a paged cache: slots of (kv heads, head size), slot = block x block size + offset."""

from typing import Any

from torch import Tensor

from headway.models.ops.native.library import dense_rows, kernels
from headway.models.ops.qk_norm_rope import Norms, qk_norm_rope, rotates_whole_heads
from headway.models.ops.registry import Op, in_c, in_triton


@Op
def write_cache(k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor, keys_SKD: Tensor, values_SKD: Tensor) -> None:
    """Token t's keys and values go to slot `slots[t]`."""
    keys_SKD.index_copy_(0, slots_T, k_TKD)
    values_SKD.index_copy_(0, slots_T, v_TKD)


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
    keys_SKD: Tensor,
    values_SKD: Tensor,
) -> Tensor:
    """`qk_norm_rope`, whose keys go to the cache with the values, and whose queries are returned."""
    q_THD, k_TKD = qk_norm_rope(q_THD, k_TKD, norms, eps, cos, sin)
    write_cache(k_TKD, v_TKD, slots_T, keys_SKD, values_SKD)
    return q_THD


def _alike_in_c(k_TKD: Tensor, v_TKD: Tensor, *_: Any) -> bool:
    return in_c(k_TKD) and k_TKD.shape == v_TKD.shape


@write_cache.backend("c", takes=_alike_in_c)
def _write_cache_c(k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor, keys_SKD: Tensor, values_SKD: Tensor) -> None:
    k_TKD, v_TKD = dense_rows(k_TKD), dense_rows(v_TKD)
    tokens, kv_heads, size = k_TKD.shape
    kernels().write_cache(
        k_TKD.data_ptr(), k_TKD.stride(0), v_TKD.data_ptr(), v_TKD.stride(0), slots_T.data_ptr(), tokens,
        kv_heads * size, keys_SKD.data_ptr(), values_SKD.data_ptr(),
    )  # fmt: skip


def _whole_in_triton(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, norms: Norms | None, eps: float, cos: Tensor, *_: Any
) -> bool:
    return in_triton(q_THD) and rotates_whole_heads(q_THD, cos)


qk_norm_rope_to_cache.backend("triton", takes=_whole_in_triton)(
    "headway.models.ops.triton.kv_cache:qk_norm_rope_to_cache"
)
