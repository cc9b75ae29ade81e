"""Blocks of rows in one forward pass, each with an adapter that is not part of the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from headway.models.ops.lora_blocks import LoraBlock

Pair = tuple[Tensor, Tensor]
"""A (rank, in) and B (rank, out)."""


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

    @property
    def only(self) -> AdapterBlock | None:
        """The block, where there is one alone. It has all rows of what a layer gets, which may be a portion."""
        return self.blocks[0] if len(self.blocks) == 1 else None

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
