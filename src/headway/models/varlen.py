"""CUDA kernels of packed attention in half precision: one call over many samples, or cuDNN for a long one."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_CAUSAL = (-1, 0)
_LENGTH_STEP = 1024
"""cuDNN prepares a kernel per shape, which takes longer than running it: lengths are rounded up to few shapes."""


def varlen_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Causal attention within samples that end at `ends[1:]`."""
    kernel, told_of_groups = _kernel()
    extra = {"enable_gqa": q_THD.shape[1] != k_TKD.shape[1]} if told_of_groups else {}
    out: Tensor = kernel(q_THD, k_TKD, v_TKD, ends, ends, longest, longest, window_size=_CAUSAL, **extra)
    return out


def long_attention(q_nHD: Tensor, k_nKD: Tensor, v_nKD: Tensor) -> Tensor:
    """Causal attention within one sample; padded at the end, where causal attention never looks."""
    length = len(q_nHD)
    padding = -length % _LENGTH_STEP
    q, k, v = (_padded(x, padding).transpose(0, 1).unsqueeze(0) for x in (q_nHD, k_nKD, v_nKD))
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out[0].transpose(0, 1)[:length]


def _padded(x_nHD: Tensor, padding: int) -> Tensor:
    return F.pad(x_nHD, (0, 0, 0, 0, 0, padding)) if padding else x_nHD


@cache
def _kernel() -> tuple[Callable[..., Any], bool]:
    """torch's kernel, and whether it wants to be told of grouped queries (older versions see it).

    Imported late, since it brings in torch's compiler, which takes seconds.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters
