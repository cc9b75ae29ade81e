"""The bank of adapters: how many slots every linear layer has, of what rank, and which tokens use which."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class AdapterBank:
    """Slots of `rank` each; slot s scales by `scales[s]` (alpha / rank). `default` is the slot of tokens that
    come without an index: the one in training; None (the base model) in serving."""

    rank: int
    scales: list[float]
    default: int | None

    def gate(self, adapters_T: Tensor | None) -> Tensor | float | None:
        """What a forward pass scales the ranks by: a number, one per rank, (T, ranks), or None for the base model."""
        if adapters_T is None:
            if self.default is None:
                return None
            if len(self.scales) == 1:
                return self.scales[0]
            adapters_T = torch.tensor([self.default])
        # Slot numbers against each token's own: a row of zeros where the index is -1 or the slot is another's.
        device = adapters_T.device
        own_TS = adapters_T.unsqueeze(-1) == torch.arange(len(self.scales), device=device)
        gate_TS = own_TS * torch.tensor(self.scales, device=device)
        return gate_TS.repeat_interleave(self.rank, dim=-1)
