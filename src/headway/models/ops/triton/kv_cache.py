"""Norm per head, rotate and write to the paged cache the outputs of the q, k and v layers, in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.attention.kv_cache import CachedHeads
from headway.models.ops.triton.fp8 import inverse, scale_of

_HEADS = 8
"""Heads per program."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _norm_rope_write_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    q, k, v, q_weight, k_weight, cos, sin, slots, q_out, keys, values, key_scales, value_scales, eps, q_stride,
    k_stride, v_stride, kv_stride, heads, kv_heads, HALF: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < HALF
    is_q = (head < heads) & inside
    is_k = (head >= heads) & (head < heads + kv_heads) & inside
    is_v = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads) & inside
    q_at = q + token * q_stride + head * (2 * HALF) + column
    k_at = k + token * k_stride + (head - heads) * (2 * HALF) + column
    v_at = v + token * v_stride + (head - heads - kv_heads) * (2 * HALF) + column
    a = tl.load(q_at, is_q, other=0.0).to(tl.float32) + tl.load(k_at, is_k, other=0.0).to(tl.float32)
    b = tl.load(q_at + HALF, is_q, other=0.0).to(tl.float32) + tl.load(k_at + HALF, is_k, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        first = tl.load(q_weight + column + head * 0, is_q, other=0.0).to(tl.float32)
        first += tl.load(k_weight + column + head * 0, is_k, other=0.0).to(tl.float32)
        second = tl.load(q_weight + HALF + column + head * 0, is_q, other=0.0).to(tl.float32)
        second += tl.load(k_weight + HALF + column + head * 0, is_k, other=0.0).to(tl.float32)
        # Rounded here as between the plain functions, so that both give the same.
        a = (a * scale * first).to(q_out.dtype.element_ty).to(tl.float32)
        b = (b * scale * second).to(q_out.dtype.element_ty).to(tl.float32)
    c = tl.load(cos + token * (2 * HALF) + column, inside, other=0.0)
    s = tl.load(sin + token * (2 * HALF) + HALF + column, inside, other=0.0)
    rotated_a = a * c - b * s
    rotated_b = b * c + a * s
    to_q = q_out + (token * heads + head) * (2 * HALF) + column
    tl.store(to_q, rotated_a, is_q)
    tl.store(to_q + HALF, rotated_b, is_q)
    slot = tl.load(slots + token)
    first_v = tl.load(v_at, is_v, other=0.0)
    second_v = tl.load(v_at + HALF, is_v, other=0.0)
    if FP8:
        # Rounded as between the plain functions. A head of keys has zeros for values here, and the other way round.
        first_k = tl.where(is_k, rotated_a, 0.0).to(q_out.dtype.element_ty).to(tl.float32)
        second_k = tl.where(is_k, rotated_b, 0.0).to(q_out.dtype.element_ty).to(tl.float32)
        rotated_a = first_k + first_v.to(tl.float32)
        rotated_b = second_k + second_v.to(tl.float32)
        scale = scale_of(tl.max(tl.maximum(tl.abs(rotated_a), tl.abs(rotated_b)), 1, keep_dims=True))
        rotated_a = (rotated_a * inverse(scale)).to(keys.dtype.element_ty)
        rotated_b = (rotated_b * inverse(scale)).to(keys.dtype.element_ty)
        first_v = rotated_a
        second_v = rotated_b
        scale_at = slot * kv_heads + head - heads
        tl.store(key_scales + scale_at, scale, (head >= heads) & (head < heads + kv_heads))
        scale_at -= kv_heads
        tl.store(value_scales + scale_at, scale, (head >= heads + kv_heads) & (head < heads + 2 * kv_heads))
    to_k = keys + slot * kv_stride + (head - heads) * (2 * HALF) + column
    tl.store(to_k, rotated_a, is_k)
    tl.store(to_k + HALF, rotated_b, is_k)
    to_v = values + slot * kv_stride + (head - heads - kv_heads) * (2 * HALF) + column
    tl.store(to_v, first_v, is_v)
    tl.store(to_v + HALF, second_v, is_v)


def qk_norm_rope_to_cache(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots_T: Tensor,
    keys: CachedHeads,
    values: CachedHeads,
) -> Tensor:
    """Queries, normed (by the first of `norms`) and rotated. Keys, treated alike, and values go into their slots."""
    tokens, heads, dim = q_THD.shape
    kv_heads = k_TKD.shape[1]
    q_out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    q_weight, k_weight = norms or (cos, cos)
    _norm_rope_write_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS))](
        q_THD, k_TKD, v_TKD, q_weight, k_weight, cos, sin, slots_T, q_out, keys.numbers, values.numbers, keys.scales,
        values.scales, eps, q_THD.stride(0), k_TKD.stride(0), v_TKD.stride(0), keys.numbers.stride(0), heads, kv_heads,
        HALF=dim // 2, NORM=norms is not None, FP8=keys.scales is not None, HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(dim // 2), num_warps=2,
    )  # fmt: skip
    return q_out
