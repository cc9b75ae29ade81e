"""Blocks of rows computed apart: each as if it were alone, inside one pass over all of them.

The result of a matrix product may depend in its last bits on how many rows it has, and on a CPU so may that of an
activation function. Here every layer computes one block after the other; all blocks share the layer's weights, which
are gathered once where ranks share them.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.models.adapter_rows.blocks import AdapterBlocks
from headway.models.attention import PackedPlan
from headway.models.layers.block import Block, RunBlock
from headway.models.layers.context import ForwardContext


def split_context(context: ForwardContext, blocks: AdapterBlocks) -> list[ForwardContext]:
    """Make the context that each block would have in a pass by itself."""
    sizes = [block.rows for block in blocks.blocks]
    device = context.rotary[0][0].device
    halves = [(torch.split(cos, sizes), torch.split(sin, sizes)) for cos, sin in context.rotary]
    return [
        replace(
            context,
            plan=PackedPlan(block.lengths, device),
            rotary=[(cos[number], sin[number]) for cos, sin in halves],
            adapter_gate=AdapterBlocks([block], apart=True),
            chosen_positions={},
        )
        for number, block in enumerate(blocks.blocks)
    ]


class RunApart:
    """Run a decoder block on each part of a pass by itself, as `run` does or with its activations kept. For
    `DecoderLM.recompute_blocks`."""

    def __init__(self, run: RunBlock | None = None) -> None:
        self._run = run

    def __call__(
        self, block: Block, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if not context.parts:
            return self._one(block, x_TD, context, given_Tk)
        sizes = context.part_sizes
        given: Sequence[Tensor | None]
        given = [None] * len(sizes) if given_Tk is None else torch.split(given_Tk, sizes)
        each = zip(torch.split(x_TD, sizes), context.parts, given, strict=True)
        outs, used = zip(*(self._one(block, x, part, own) for x, part, own in each), strict=True)
        return torch.cat(outs), None if used[0] is None else torch.cat(used)

    def _one(
        self, block: Block, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        gate = context.adapter_gate
        if isinstance(gate, AdapterBlocks) and gate.only is not None and not gate.only.routed:
            given_Tk = None  # rows of -1, for the sake of other blocks
        if self._run is not None:
            return self._run(block, x_TD, context, given_Tk)
        return block.run(x_TD, context, given_Tk)
