"""Blocks of rows in one forward pass, each with an adapter that is not part of the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headway.models.ops.linear import Scale
from headway.models.ops.lora_blocks import LoraBlock

Pair = tuple[Tensor, Tensor]
"""A (rank, in) and B (rank, out)."""

_MOST_RANKS = 512
"""Ranks of all blocks up to which one product over all rows, with zeros for those of other blocks, is faster."""


@dataclass(frozen=True, slots=True)
class AdapterBlock:
    """Whole samples of these lengths, end to end, and their adapter.

    `pairs` has the adapter's A and B by linear layer; `scale` is alpha / rank. `routed`: a recorded choice of experts
    comes with the tokens.
    """

    lengths: Sequence[int]
    pairs: Mapping[nn.Module, Pair]
    scale: float
    routed: bool = False

    @property
    def rows(self) -> int:
        """The tokens of all its samples."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class AdapterBlocks:
    """The blocks of a pass, end to end: which rows use which adapter. Linear layers take it as their gate.

    `apart`: every block is computed by itself in all layers, in the shapes that it would have alone, so that its
    numbers do not depend on the other blocks in the last bit. Otherwise the products with the model's own weights are
    over all rows at once: faster, and equal up to rounding.
    """

    blocks: Sequence[AdapterBlock]
    apart: bool
    _gates: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @property
    def only(self) -> AdapterBlock | None:
        """The block, where there is one alone. It has all rows of what a layer gets, which may be a portion."""
        return self.blocks[0] if len(self.blocks) == 1 else None

    def joined(self, linears: Sequence[nn.Module]) -> tuple[list[Tensor], list[Tensor], Scale] | None:
        """The adapters of these layers as one adapter each, A and B of all blocks one below the other, and what scales
        its ranks. None where a block has no adapter in one of them, or where ranks are many: block by block then.
        """
        pairs = [[block.pairs.get(linear) for block in self.blocks] for linear in linears]
        found = [[pair for pair in row if pair is not None] for row in pairs]
        if any(len(row) < len(self.blocks) for row in found):
            return None
        if self.only is not None:
            return [a for ((a, _),) in found], [b for ((_, b),) in found], self.only.scale
        ranks = tuple(len(a) for a, _ in found[0])
        if self.apart or sum(ranks) > _MOST_RANKS or any(tuple(len(a) for a, _ in row) != ranks for row in found):
            return None
        downs, ups = ([torch.cat([pair[half] for pair in row]) for row in found] for half in (0, 1))
        return downs, ups, self._gate(ranks, downs[0].device)

    def _gate(self, ranks: tuple[int, ...], device: torch.device) -> Tensor:
        """(rows, all ranks): a block's scale at its own rows and ranks, 0 elsewhere. Made once in a pass."""
        if ranks not in self._gates:
            each = zip(self.blocks, ranks, strict=True)
            own = [torch.full((block.rows, rank), block.scale, device=device) for block, rank in each]
            self._gates[ranks] = torch.block_diag(*own)  # type: ignore[no-untyped-call]  # torch has no types here
        return self._gates[ranks]

    def of_layer(self, linear: nn.Module) -> list[LoraBlock]:
        """The adapters of one linear layer, as `ops.add_lora_blocks` takes them."""
        halves = [block.pairs.get(linear, (None, None)) for block in self.blocks]
        each = zip(self.blocks, halves, strict=True)
        return [LoraBlock(block.rows, down, up, block.scale) for block, (down, up) in each]

    def parameters_of(self, module: nn.Module) -> list[Tensor]:
        """The tensors of all adapters in the layers of a module, in order: they are no parameters of it."""
        layers = list(module.modules())
        return [half for block in self.blocks for layer in layers for half in block.pairs.get(layer, ())]


AdapterGate = Tensor | float | AdapterBlocks | None
"""What chooses and scales adapters in a pass: numbers for the slots of the model's bank (`AdapterBank.gate`), blocks
with adapters of their own, or None for the base model."""
