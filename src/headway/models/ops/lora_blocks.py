"""Low-rank products of blocks of rows, each block with an adapter of its own rank."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.ops.registry import Op, cast


class LoraBlock(NamedTuple):
    """The next `rows` rows, and their adapter in a layer: down (rank, in), up (rank, out), and the factor of its ranks.
    Without `down` and `up` the block has none there."""

    rows: int
    down: Tensor | None
    up: Tensor | None
    scale: float


@Op
def add_lora_blocks(out_TO: Tensor, x_TI: Tensor, blocks: Sequence[LoraBlock]) -> Tensor:
    """out + scale * (x @ down.T) @ up, block by block. Ranks may differ: nothing is padded to the largest.

    A single block has all rows, however many there are.
    """
    if len(blocks) == 1:
        return _added(out_TO, x_TI, blocks[0])
    sizes = [block.rows for block in blocks]
    each = zip(torch.split(out_TO, sizes), torch.split(x_TI, sizes), blocks, strict=True)
    return torch.cat([_added(out, x, block) for out, x, block in each])


def _added(out_TO: Tensor, x_TI: Tensor, block: LoraBlock) -> Tensor:
    if block.down is None or block.up is None:
        return out_TO
    ranks_TR = F.linear(x_TI, cast(block.down, x_TI.dtype)) * block.scale
    return torch.addmm(out_TO, ranks_TR.to(out_TO.dtype), cast(block.up, out_TO.dtype))
