"""FlashAttention 4, where it is installed: on Hopper faster than torch's kernels, over one sample or many packed ones.

Its kernels are compiled when they are first needed, which takes some seconds, and kept in the cache folder.
"""

import logging
import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.base.cache import cache_folder
from headway.base.extras import install_command
from headway.models.ops.attention.cuda import head_groups

logger = logging.getLogger(__name__)

FROM = 1024
"""Worth its compiling from samples of this many tokens on; for shorter ones torch's kernels do."""


class Kernels(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]


def works(q_THD: Tensor, k_TKD: Tensor, *, packed: bool) -> bool:
    """Tell if the kernels for heads like these work here. They are tried once; the log has the result."""
    return _works(q_THD.device, q_THD.dtype, q_THD.shape[2], q_THD.shape[1] // k_TKD.shape[1], packed)


def flash_forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, ends: Tensor | None, longest: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Causal attention within samples that end at `ends[1:]`, or within one; also what `flash_backward` needs."""
    rows = _rows(ends, q_THD, k_TKD, v_TKD)
    out, normalizers, *_ = _kernels().forward(*rows, causal=True, return_lse=True, **_samples(ends, longest))
    return out if ends is not None else out[0], (normalizers,)


def flash_backward(
    grad_THD: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out_THD: Tensor,
    kept: tuple[Tensor, ...],
    ends: Tensor | None,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, of some heads at a time where all would need much memory."""
    (normalizers,) = kept
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv)
    groups = head_groups(grad_THD, qkv[1])
    wholes = (*qkv, out_THD, grad_THD, dq, dk, dv)
    each = zip(*(x.chunk(groups, dim=1) for x in wholes), normalizers.chunk(groups, dim=-2), strict=True)
    for *parts, own_normalizers in each:
        q, k, v, out, grad, own_dq, own_dk, own_dv = _rows(ends, *parts)
        into = {"dq": own_dq, "dk": own_dk, "dv": own_dv}
        _kernels().backward(q, k, v, out, grad, own_normalizers, causal=True, **into, **_samples(ends, longest))
    return dq, dk, dv


def _rows(ends: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """Add the axis of samples that the kernels want where they don't get their ends."""
    return [tensor.unsqueeze(0) if ends is None else tensor for tensor in tensors]


def _samples(ends: Tensor | None, longest: int) -> dict[str, Any]:
    if ends is None:
        return {}
    return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}


@cache
def _works(device: torch.device, dtype: torch.dtype, size: int, group: int, packed: bool) -> bool:
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    if not installed():
        logger.info(
            "attention by torch's kernels; FlashAttention 4 is faster on this GPU: %s", install_command("flash")
        )
        return False
    ends = torch.tensor([0, 200, 600], dtype=torch.int32, device=device) if packed else None
    q, k = (torch.zeros(600, heads, size, dtype=dtype, device=device) for heads in (group, 1))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out, kept = flash_forward(q, k, k.clone(), ends, 400)
            flash_backward(q, (q, k, k.clone()), out, kept, ends, 400)
    except Exception as error:  # of whatever kind: a compiler runs in there
        logger.warning("attention by torch's kernels, since FlashAttention 4 does not work here: %s", error)
        return False
    logger.info("attention by FlashAttention 4, for %s", "packed samples" if packed else "single samples")
    return True


@cache
def installed() -> bool:
    try:
        return find_spec("flash_attn.cute") is not None
    except ImportError:  # there is no flash_attn, or an older one that is broken
        return False


@cache
def _kernels() -> Kernels:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_folder() / "flash-attention"))
    from flash_attn.cute.interface import (  # type: ignore[import-not-found]  # an extra
        _flash_attn_bwd,
        _flash_attn_fwd,
    )

    return Kernels(_flash_attn_fwd, _flash_attn_bwd)
