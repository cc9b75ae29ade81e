"""Root-mean-square norm of the last axis, alone or of a sum. The statistics are float32 whatever the input is."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.ops.fp8.blocks import BLOCK, Fp8Blocks, quantize_1x128
from headway.models.ops.native.library import dense_rows, kernels
from headway.models.ops.registry import Op, cast, in_c, in_triton, in_triton_serving


@Op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight` may be of a higher precision than `x`, and then so is its gradient."""
    return _normed(x, weight, eps)


@Op
def add_rms_norm(stream_TD: Tensor, delta_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The stream with `delta` added to it, and the norm of that: between two stages of a block. In serving passes
    `delta` may be parts (S, T, D) in float32, whose sum is rounded and added."""
    stream_TD = stream_TD + (delta_TD if delta_TD.dim() == stream_TD.dim() else delta_TD.sum(0).to(stream_TD.dtype))
    return stream_TD, _normed(stream_TD, weight, eps)


@Op
def add_rms_norm_fp8(
    stream_TD: Tensor, delta_TD: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Fp8Blocks]:
    """`add_rms_norm`, and the normed rows in FP8."""
    stream_TD, normed_TD = add_rms_norm(stream_TD, delta_TD, weight, eps)
    return stream_TD, normed_TD, quantize_1x128(normed_TD)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computed in the higher of both precisions, and rounded once."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    return cast(F.rms_norm(cast(x, wide), weight.shape, cast(weight, wide), eps), x.dtype)


@rms_norm.backend("c", takes=lambda x, *_: x.dim() == 2 and in_c(x))
def _rms_norm_c(x_TD: Tensor, weight: Tensor, eps: float) -> Tensor:
    x_TD = dense_rows(x_TD)
    rows, size = x_TD.shape
    out = torch.empty(rows, size)
    kernels().rms_norm(
        x_TD.data_ptr(), x_TD.stride(0), rows, size, weight.data_ptr(), eps, out.data_ptr(), torch.get_num_threads()
    )
    return out


@add_rms_norm.backend("c", takes=in_c)
def _add_rms_norm_c(stream_TD: Tensor, delta_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    stream_TD, delta_TD = stream_TD.contiguous(), delta_TD.contiguous()
    total, out = torch.empty(stream_TD.shape), torch.empty(stream_TD.shape)
    kernels().add_rms_norm(
        stream_TD.data_ptr(), delta_TD.data_ptr(), *stream_TD.shape, weight.data_ptr(), eps, total.data_ptr(),
        out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return total, out


def _rows_in_triton(x: Tensor, *_: Any) -> bool:
    return x.dim() == 2 and in_triton(x)


def _blocks_in_triton(x: Tensor, *_: Any) -> bool:
    return x.shape[-1] % BLOCK == 0 and in_triton_serving(x)


_TRITON = "headway.models.ops.triton.rms_norm"
rms_norm.backend("triton", takes=lambda x, *_: x.dim() == 2 and in_triton_serving(x))(f"{_TRITON}:rms_norm_serving")
rms_norm.backend("triton", takes=_rows_in_triton, trains=True)(f"{_TRITON}:rms_norm")
add_rms_norm.backend("triton", takes=in_triton_serving)(f"{_TRITON}:add_rms_norm_serving")
add_rms_norm.backend("triton", takes=in_triton, trains=True)(f"{_TRITON}:add_rms_norm")
add_rms_norm_fp8.backend("triton", takes=_blocks_in_triton)(f"{_TRITON}:add_rms_norm_fp8")
