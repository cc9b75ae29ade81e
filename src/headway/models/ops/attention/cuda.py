"""CUDA kernels of packed attention in half precision: one call over many samples, or cuDNN for a long one."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_CAUSAL = (-1, 0)
_LENGTH_STEP = 1024
"""cuDNN prepares a kernel per shape, which takes longer than running it: lengths are rounded up to few shapes."""

_ELEMENTS = 2**26
"""Numbers of the queries' gradient that a backward pass computes at a time; it takes eight bytes more for each."""


def in_half(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def varlen_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Causal attention within samples that end at `ends[1:]`."""
    kernel, supports_gqa = _kernel()
    extra = {"enable_gqa": q_THD.shape[1] != k_TKD.shape[1]} if supports_gqa else {}
    out: Tensor = kernel(q_THD, k_TKD, v_TKD, ends, ends, longest, longest, window_size=_CAUSAL, **extra)
    return out


def long_attention(q_nHD: Tensor, k_nKD: Tensor, v_nKD: Tensor) -> Tensor:
    """Causal attention within one sample; padded at the end, where causal attention never looks."""
    q, k, v = _batched(q_nHD, k_nKD, v_nKD)
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return _rows(out, len(q_nHD))


def varlen_forward(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    ends: Tensor,
    longest: int,
    *,
    keys: tuple[Tensor, int] | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`varlen_attention` without a graph: also what `varlen_backward` needs to know besides, first the logarithms (H,
    T) of what weights are divided by. `keys` are the ends and the longest of samples of which the queries are the last
    tokens; None: all of them."""
    key_ends, most_keys = keys or (ends, longest)
    out, normalizers, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q_THD, k_TKD, v_TKD, ends, key_ends, longest, most_keys, 0.0, True, False, scale=scale, **_sides(window)
    )
    return out, (normalizers, state, unused)


def varlen_backward(
    grad_THD: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out_THD: Tensor,
    kept: tuple[Tensor, ...],
    ends: Tensor,
    longest: int,
    *,
    keys: tuple[Tensor, int] | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    normalizers, state, unused = kept
    key_ends, most_keys = keys or (ends, longest)
    samples = ends, key_ends, longest, most_keys
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad_THD, *qkv, out_THD, normalizers, *samples, 0.0, True, state, unused, scale=scale, **_sides(window)
    )
    return grads


def _sides(window: int | None) -> dict[str, int]:
    """The number of keys that a query sees on either side of its own."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def long_forward(q_nHD: Tensor, k_nKD: Tensor, v_nKD: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`long_attention` without a graph: also what `long_backward` needs to know besides."""
    out, normalizers, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *_batched(q_nHD, k_nKD, v_nKD), None, True, 0.0, True, False
    )
    return _rows(out, len(q_nHD)), (normalizers, seed, offset)


def long_backward(
    grad_nHD: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out_nHD: Tensor, kept: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values. Rows of padding have no gradient and so change none.

    Some heads at a time where all would need more than a little memory on the side.
    """
    groups = head_groups(grad_nHD, qkv[1])
    if groups == 1:
        return _long_backward(grad_nHD, qkv, out_nHD, kept)
    normalizers, *rest = kept
    grads = tuple(torch.empty_like(x) for x in qkv)
    for grad, q, k, v, out, lse, *into in zip(
        *(x.chunk(groups, dim=1) for x in (grad_nHD, *qkv, out_nHD, normalizers, *grads)), strict=True
    ):
        for whole, part in zip(into, _long_backward(grad, (q, k, v), out, (lse.contiguous(), *rest)), strict=True):
            whole.copy_(part)
    dq, dk, dv = grads
    return dq, dk, dv


def head_groups(grad_THD: Tensor, k_TKD: Tensor) -> int:
    """The number of parts of equal heads to cut a backward pass into, so that it needs little memory on the side."""
    heads = k_TKD.shape[1]
    groups = min(heads, max(1, grad_THD.numel() // _ELEMENTS))
    return 1 if heads % groups else groups


def _long_backward(
    grad_nHD: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out_nHD: Tensor, kept: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    grad, *inputs, out = _batched(grad_nHD, *qkv, out_nHD)
    size, length = inputs[0].shape[2], len(grad_nHD)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, *inputs, out, *kept, None, None, None, size, size, 0.0, True
    )
    dq, dk, dv = (_rows(x, length) for x in grads)
    return dq, dk, dv


def _batched(*rows: Tensor) -> list[Tensor]:
    """(1, H, n, D) of each (n, H, D), padded at the end."""
    padding = -len(rows[0]) % _LENGTH_STEP
    return [_padded(x, padding).transpose(0, 1).unsqueeze(0) for x in rows]


def _rows(x_1HnD: Tensor, length: int) -> Tensor:
    return x_1HnD[0].transpose(0, 1)[:length]


def _padded(x_nHD: Tensor, padding: int) -> Tensor:
    return F.pad(x_nHD, (0, 0, 0, 0, 0, padding)) if padding else x_nHD


@cache
def _kernel() -> tuple[Callable[..., Any], bool]:
    """torch's kernel, and whether it wants to be told of grouped queries (older versions see it).

    Imported late, since it brings in torch's compiler, which takes seconds.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters
