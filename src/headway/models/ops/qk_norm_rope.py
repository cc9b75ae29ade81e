"""Queries and keys at their positions: norm per head, where a model has one, then rotary positions."""

from typing import Any

import torch
from torch import Tensor

from headway.models.ops.native.library import dense_rows, kernels
from headway.models.ops.registry import Op, in_c, in_triton
from headway.models.ops.rms_norm import rms_norm

Norms = tuple[Tensor, Tensor]
"""The weights of the queries' and of the keys' norm."""


@Op
def rope(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of a head by its position's angle. Computed in float32, returned as `x` came.

    `cos` and `sin` are (T, 1, size); `sin` carries the sign of the rotation. Where the size is smaller than a head's
    (partial rotary), the rest of the head stays as it is.
    """
    if (size := cos.shape[-1]) < x_THD.shape[-1]:
        return torch.cat((rope(x_THD[..., :size], cos, sin), x_THD[..., size:]), -1)
    swapped = x_THD.roll(x_THD.shape[-1] // 2, -1)
    return torch.addcmul(x_THD * cos, swapped, sin).to(x_THD.dtype)


@Op
def qk_norm_rope(
    q_THD: Tensor, k_TKD: Tensor, norms: Norms | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys normed per head by the weights `norms`, where there are any, then rotated."""
    if norms is not None:
        q_THD, k_TKD = rms_norm(q_THD, norms[0], eps), rms_norm(k_TKD, norms[1], eps)
    return rope(q_THD, cos, sin), rope(k_TKD, cos, sin)


@Op
def qkv_norm_rope(
    x_TND: Tensor, heads: int, norms: Norms, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope` of parts of one tensor, and the values. Of a token's heads the first `heads` are queries; keys and
    values share the rest."""
    rest = (x_TND.shape[1] - heads) // 2
    q_THD, k_TKD, v_TKD = torch.split(x_TND, [heads, rest, rest], dim=1)
    return *qk_norm_rope(q_THD, k_TKD, norms, eps, cos, sin), v_TKD


def rotates_whole_heads(x_THD: Tensor, cos: Tensor) -> bool:
    """Kernels have no partial rotary."""
    return cos.shape[-1] == x_THD.shape[-1]


def _whole_in_c(q_THD: Tensor, k_TKD: Tensor, norms: Norms | None, eps: float, cos: Tensor, *_: Any) -> bool:
    return in_c(q_THD) and rotates_whole_heads(q_THD, cos)


@qk_norm_rope.backend("c", takes=_whole_in_c)
def _qk_norm_rope_c(
    q_THD: Tensor, k_TKD: Tensor, norms: Norms | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    q_THD, k_TKD = dense_rows(q_THD), dense_rows(k_TKD)
    tokens, heads, size = q_THD.shape
    kv_heads = k_TKD.shape[1]
    q_out, k_out = torch.empty(tokens, heads, size), torch.empty(tokens, kv_heads, size)
    kernels().qk_norm_rope(
        q_THD.data_ptr(), q_THD.stride(0), k_TKD.data_ptr(), k_TKD.stride(0), tokens, heads, kv_heads, size,
        norms[0].data_ptr() if norms else None, norms[1].data_ptr() if norms else None, eps, cos.data_ptr(),
        sin.data_ptr(), q_out.data_ptr(), k_out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return q_out, k_out


def _whole_in_triton(x_TND: Tensor, _: Any, norms: Norms | None, eps: float, cos: Tensor, *__: Any) -> bool:
    return in_triton(x_TND) and rotates_whole_heads(x_TND, cos)


_TRITON = "headway.models.ops.triton.qk_norm_rope"
qk_norm_rope.backend("triton", takes=_whole_in_triton, trains=True)(f"{_TRITON}:qk_norm_rope")
qkv_norm_rope.backend("triton", takes=_whole_in_triton, trains=True)(f"{_TRITON}:qkv_norm_rope")
