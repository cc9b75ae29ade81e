"""Values that all layers of a forward pass share, computed once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headway.models.adapter_rows.blocks import AdapterBlocks, AdapterGate
from headway.models.layers.norm import RMSNorm
from headway.models.layers.rope import Rotary
from headway.models.packed import AttentionPlan


@dataclass(slots=True)
class ForwardContext:
    """`rotary` are the rotary positions, one for each of the family's `ropes`; a layer knows the number of its own.

    `adapter_gate` scales the adapters' ranks per token (see `layers.linear`); None switches adapters off.

    `given_positions` and `chosen_positions` are, by layer, the positions that sparse attention is told to attend to,
    and those that it did: layers add the latter, and later ones may share them.

    `next_norm` is the norm with which whatever comes after the running block begins, where that block may compute it
    with its last sum: in serving passes. It leaves the stream and its norm in `ahead`.

    `parts`: where blocks of rows are computed apart, the context of each, in order.

    A plain object and not bare tensors, so that FSDP, which casts a block's tensor arguments to a lower precision,
    leaves the rotary tables alone.
    """

    plan: AttentionPlan
    rotary: Sequence[Rotary]
    adapter_gate: AdapterGate = None
    given_positions: Mapping[int, Tensor] | None = None
    chosen_positions: dict[int, Tensor | None] = field(default_factory=dict)
    parts: Sequence["ForwardContext"] = ()
    next_norm: RMSNorm | None = None
    ahead: tuple[Tensor, Tensor] | None = None

    def normed(self, x_TD: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """The norm of the stream, which the block before may have computed."""
        ahead, self.ahead = self.ahead, None
        return ahead[1] if ahead is not None and ahead[0] is x_TD else norm(x_TD)

    @property
    def part_sizes(self) -> list[int]:
        """The rows of each part."""
        gate = self.adapter_gate
        return [block.rows for block in gate.blocks] if isinstance(gate, AdapterBlocks) else []
