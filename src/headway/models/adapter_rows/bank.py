"""The bank of adapters: its slots, their rank and scales, and which tokens use which."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class AdapterBank:
    """Slots of `rank` each; slot s scales by `scales[s]` (alpha / rank). Tokens without an index use slot `default`:
    the one being trained; None (the base model) in serving."""

    rank: int
    scales: list[float]
    default: int | None
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict)

    def set_scale(self, slot: int, scale: float) -> None:
        """Set it in place on devices, too, so that a captured graph sees it."""
        self.scales[slot] = scale
        for scales_S in self._on_device.values():
            scales_S[slot] = scale

    def gate(self, adapters_T: Tensor | None, device: torch.device) -> Tensor | float | None:
        """Compute what scales the ranks in a pass: one number, one per rank, (T, ranks), or None for the base model."""
        if adapters_T is None:
            if self.default is None:
                return None
            if len(self.scales) == 1:
                return self.scales[0]
        slots = torch.arange(len(self.scales), device=device)
        # A token whose index is -1 equals no slot and gets a row of zeros.
        own = slots == (self.default if adapters_T is None else adapters_T.unsqueeze(-1))
        return (own * self._scales(device)).repeat_interleave(self.rank, dim=-1)

    def _scales(self, device: torch.device) -> Tensor:
        if device not in self._on_device:
            self._on_device[device] = torch.tensor(self.scales, device=device)
        return self._on_device[device]
