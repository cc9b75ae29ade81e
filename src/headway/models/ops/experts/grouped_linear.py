"""Matrix products of groups of rows, each group with a weight of its own: the experts of a layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.ops.registry import Op, cast

_ALIGNED = 8
"""The grouped kernel wants rows of whole 16 bytes."""


@Op
def grouped_linear(rows_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`F.linear` of each group of rows (group e ends at `ends[e]`) with its own weight, which may be of a higher
    precision than the rows."""
    groups = torch.split(rows_NI, group_sizes(ends_E))
    weights_EOI = cast(weight_EOI, rows_NI.dtype)
    return torch.cat([F.linear(group, weight) for group, weight in zip(groups, weights_EOI, strict=True)])


def _grouped_on_cuda(rows_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> bool:
    return rows_NI.is_cuda and grouped_at_once(rows_NI.dtype, *weight_EOI.shape[1:])


@grouped_linear.backend("torch", takes=_grouped_on_cuda, trains=True, traceable=True)
def _grouped_linear_cuda(rows_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return torch._grouped_mm(rows_NI, cast(weight_EOI, rows_NI.dtype).transpose(-2, -1), offs=ends_E)


def grouped_weight_gradient(grad_NO: Tensor, rows_NI: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the weights of `grouped_linear`, (E, O, I) in `dtype`."""
    if rows_NI.is_cuda and grouped_at_once(rows_NI.dtype, grad_NO.shape[1], rows_NI.shape[1]):
        by_input: Tensor = torch._grouped_mm(rows_NI.t(), grad_NO.contiguous(), offs=ends_E)
        return by_input.transpose(-2, -1).to(dtype)
    sizes = group_sizes(ends_E)
    groups = zip(torch.split(grad_NO, sizes), torch.split(rows_NI, sizes), strict=True)
    return torch.stack([(grad.t() @ rows).to(dtype) for grad, rows in groups])


def group_sizes(ends_E: Tensor) -> list[int]:
    """Rows of each group. The host waits for them."""
    ends = ends_E.tolist()
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def grouped_at_once(dtype: torch.dtype, outputs: int, inputs: int) -> bool:
    """Tell if CUDA's grouped kernel takes weights of this shape; the loop makes the host wait."""
    return dtype == torch.bfloat16 and outputs % _ALIGNED == 0 and inputs % _ALIGNED == 0
