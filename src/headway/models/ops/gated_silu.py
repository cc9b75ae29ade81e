"""The gate of an MLP: silu(gate) * up."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.ops.fp8.blocks import BLOCK, Fp8Blocks, quantize_1x128
from headway.models.ops.native.library import dense_rows, kernels
from headway.models.ops.registry import Op, in_c, in_triton, in_triton_serving


@Op
def gated_silu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up. Without `up`, both are halves of the columns of the first."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return F.silu(gate) * up


@Op
def gated_silu_fp8(gate_TM: Tensor, up_TM: Tensor) -> tuple[Tensor, Fp8Blocks]:
    """`gated_silu`, and its rows in FP8."""
    hidden_TM = gated_silu(gate_TM, up_TM)
    return hidden_TM, quantize_1x128(hidden_TM)


@gated_silu.backend("c", takes=in_c)
def _gated_silu_c(gate_TM: Tensor, up_TM: Tensor | None = None) -> Tensor:
    if up_TM is None:
        gate_TM, up_TM = gate_TM.chunk(2, -1)
    gate_TM, up_TM = dense_rows(gate_TM), dense_rows(up_TM)
    out = torch.empty(gate_TM.shape)
    kernels().gated_silu(
        gate_TM.data_ptr(), gate_TM.stride(0), up_TM.data_ptr(), up_TM.stride(0), *gate_TM.shape, out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def _served_rows(gate: Tensor, up: Tensor | None = None) -> bool:
    return up is not None and gate.dim() == 2 and in_triton_serving(gate)


def _halves(gate: Tensor, up: Any = None) -> bool:
    return up is None and in_triton(gate)


def _blocks(gate: Tensor, up: Tensor) -> bool:
    return gate.shape[-1] % BLOCK == 0 and _served_rows(gate, up)


_TRITON = "headway.models.ops.triton.gated_silu"
gated_silu.backend("triton", takes=_served_rows)(f"{_TRITON}:gated_silu_serving")
gated_silu.backend("triton", takes=_halves, trains=True)(f"{_TRITON}:gated_halves")
gated_silu.backend("triton", takes=in_triton, trains=True)(f"{_TRITON}:gated_silu")
gated_silu_fp8.backend("triton", takes=_blocks)(f"{_TRITON}:gated_silu_fp8")
