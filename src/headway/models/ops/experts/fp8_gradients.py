"""Gradients of experts' weights in FP8: for each expert a sum over its rows, of which both operands are quantized in
blocks of 128.

A block has rows of one expert, so that an expert's gradient depends on nothing but its own rows. Operands lie
transposed, as the hardware's products of FP8 take them: (I, P), in which the rows of every expert begin with a block
of their own. P has room for any division of the rows among experts: a size that depended on it would make the host
wait for the device.
"""

import torch
from torch import Tensor

from headway.models.ops.experts.grouped_linear import group_sizes
from headway.models.ops.fp8.blocks import BLOCK, Fp8Blocks, blocks_of, fp8_matmul, quantize_1x128
from headway.models.ops.registry import Op, in_triton


def most_blocks(rows: int, groups: int) -> int:
    """Blocks that so many groups of so many rows have at most: each group's last one may not be full."""
    return (rows + (BLOCK - 1) * groups) // BLOCK


@Op
def quantize_groups(x_TI: Tensor, ends_E: Tensor, tokens_N: Tensor | None = None) -> Fp8Blocks:
    """`quantize_columns` of each group of rows (group e ends at `ends[e]`), one after the other, with zeros up to whole
    blocks and behind the last. `tokens`: row n is row `tokens[n]` of x. Rows beyond the last end may hold anything."""
    rows_NI = x_TI if tokens_N is None else x_TI[tokens_N]
    padded = rows_NI.new_zeros(most_blocks(len(rows_NI), len(ends_E)) * BLOCK, rows_NI.shape[1])
    start = place = 0
    for size in group_sizes(ends_E):
        padded[place : place + size] = rows_NI[start : start + size]
        start, place = start + size, place + blocks_of(size) * BLOCK
    return quantize_1x128.reference(padded.t())


@Op
def fp8_grouped_weight_gradient(
    grad_OP: Tensor, grad_scales: Tensor, rows_IP: Tensor, rows_scales: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient of the weights of `fp8_grouped_matmul`, (E, O, I) in `dtype`: `fp8_matmul` of each group's blocks,
    which `quantize_groups` made. Groups without rows get zeros."""
    each, block = [], 0
    for size in group_sizes(ends_E):
        blocks = slice(block, block + blocks_of(size))
        places = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
        grad, rows = (grad_OP[:, places], grad_scales[:, blocks]), (rows_IP[:, places], rows_scales[:, blocks])
        each.append(fp8_matmul.reference(*grad, *rows, dtype))
        block = blocks.stop
    return torch.stack(each)


_TRITON = "headway.models.ops.triton.fp8_expert_gradients:"
quantize_groups.backend("triton", takes=in_triton)(f"{_TRITON}quantize_groups")
fp8_grouped_weight_gradient.backend("triton", takes=in_triton)(f"{_TRITON}fp8_grouped_weight_gradient")
