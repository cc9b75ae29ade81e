"""Adapters inside of an FP8 product: their ranks are columns beside the input's, and their second halves beside the
weight's, so that one product adds up both.

    x @ weight.T + ranks @ up  =  [x | ranks] @ [weight | up.T].T

e4m3 has four significant bits, too few for an adapter. So a number is two: `high`, and `low`, what high leaves. A rank
then has three columns, for high times high, low times high and high times low; low times low is below what is kept.
All ranks of a row have one scale, and so have those of a block of 128 outputs.
"""

import torch
from torch import Tensor

from headway.models.ops.fp8.blocks import (
    BLOCK,
    FP8,
    LARGEST,
    SMALLEST,
    Fp8Blocks,
    blocks_of,
    quantize_1x128,
    transpose_blocks,
)
from headway.models.ops.registry import Op, in_triton

PARTS = 3
"""Columns of a rank."""


def rank_columns(ranks: int) -> int:
    """Columns for so many ranks, in whole blocks."""
    return BLOCK * blocks_of(PARTS * ranks)


@Op
def rows_with_ranks(x_TI: Tensor, ranks_TR: Tensor) -> Fp8Blocks:
    """`quantize_1x128` of rows, of whole blocks, and their ranks beside them."""
    columns = rank_columns(ranks_TR.shape[1])
    scales_T1 = _scales(ranks_TR.float().abs().amax(1, keepdim=True))
    high, low = _halves(ranks_TR, scales_T1)
    return _beside(quantize_1x128.reference(x_TI), [high, low, high], scales_T1, columns)


@Op
def weights_with_ranks(ups_RO: Tensor, table: Fp8Blocks, transposed: bool = False) -> Fp8Blocks:
    """A weight (O, I) in 128x128 blocks and the second halves of adapters beside it; `transposed`: (I, O), and `ups`
    are (R, I), the first halves."""
    table = transpose_blocks(table) if transposed else table
    columns = rank_columns(len(ups_RO))
    largest = ups_RO.float().abs().amax(0).view(-1, BLOCK).amax(1)
    scales_O1 = _scales(largest)[:, None]
    high, low = _halves(ups_RO.t(), scales_O1.repeat_interleave(BLOCK, 0))
    return _beside(table, [high, high, low], scales_O1, columns)


def _scales(largest: Tensor) -> Tensor:
    return largest.clamp_min(SMALLEST) / largest.new_full((), LARGEST)


def _halves(numbers: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    scaled = numbers.float() * (1 / scales)
    high = scaled.to(FP8)
    return high, (scaled - high.float()).to(FP8)


def _beside(blocks: Fp8Blocks, parts: list[Tensor], scales: Tensor, columns: int) -> Fp8Blocks:
    """Put columns to the right of blocks. Scales keep the order that they have."""
    (rows, width), ranks = blocks.values.shape, parts[0].shape[1]
    values = torch.zeros((rows, width + columns), dtype=torch.uint8, device=blocks.values.device)
    values[:, :width] = blocks.values.view(torch.uint8)
    for number, part in enumerate(parts):
        values[:, width + number * ranks :][:, :ranks] = part.view(torch.uint8)
    whole = torch.cat([blocks.scales, scales.expand(-1, blocks_of(columns))], 1)
    by_column = blocks.scales.stride(0) == 1 and len(blocks.scales) == rows
    return Fp8Blocks(values.view(FP8), whole.t().contiguous().t() if by_column else whole)


_TRITON = "headway.models.ops.triton.fp8_ranks:"
rows_with_ranks.backend("triton", takes=in_triton)(f"{_TRITON}rows_with_ranks")
weights_with_ranks.backend("triton", takes=in_triton)(f"{_TRITON}weights_with_ranks")
