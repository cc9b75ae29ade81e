"""Rotary positions: tables in float32, gathered once per forward pass."""

import math

import torch
from torch import Tensor

from headway.models.configs.rotary import RopeParameters, RopeScaling

Rotary = tuple[Tensor, Tensor]
"""cos and signed sin, (T, 1, rotary size) in float32, as `ops.rope` takes them."""


class RotaryTable:
    """cos and sin of every position times every frequency, built on a device when it is first needed there.

    Not a module with buffers: a model built on the meta device and materialized later would lose them.
    """

    def __init__(self, rope: RopeParameters, max_len: int) -> None:
        self._rope, self._max_len = rope, max_len
        self._tables: dict[torch.device, Rotary] = {}

    def gather(self, positions_T: Tensor) -> Rotary:
        """cos and signed sin of these positions."""
        cos, sin = self.table(positions_T.device)
        return cos[positions_T].unsqueeze(1), sin[positions_T].unsqueeze(1)

    def gather_axes(self, positions_AT: Tensor, axes_D: Tensor) -> Rotary:
        """cos and signed sin of positions in several axes, where each number turns by the position in its own axis."""
        cos, sin = self.table(positions_AT.device)
        # Kernels take rows of numbers one after the other, and what is looked up is laid out as the index is.
        rows_TD = positions_AT[axes_D].t().contiguous()
        numbers_D = torch.arange(len(axes_D), device=axes_D.device)
        return cos[rows_TD, numbers_D].unsqueeze(1), sin[rows_TD, numbers_D].unsqueeze(1)

    def table(self, device: torch.device) -> Rotary:
        """cos and signed sin of all positions, (positions, rotary size)."""
        tables = self._tables.get(device)
        if tables is None:
            tables = self._tables[device] = self._build(device)
        return tables

    @torch.inference_mode(False)
    def _build(self, device: torch.device) -> Rotary:
        angles = torch.arange(self._max_len, dtype=torch.float32)[:, None] * inverse_frequencies(self._rope)
        factor = 1.0 if self._rope.scaling is None else self._rope.scaling.rotary_factor
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def pairs_to_halves(x: Tensor) -> Tensor:
    """Reorder heads whose neighbours are rotated together (DeepSeek) to those that `ops.rope` takes: two halves."""
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


def inverse_frequencies(rope: RopeParameters) -> Tensor:
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None or scaling.type == "dynamic":
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    kept_share = _kept_by_wavelength(frequencies, scaling) if scaling.type == "llama3" else _kept_by_turns(rope)
    return kept_share * frequencies + (1 - kept_share) * frequencies / scaling.factor


def _kept_by_wavelength(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's share of each frequency that stays: by how often its wave fits into the trained context."""
    waves = scaling.original_max_len * frequencies / (2 * math.pi)
    return ((waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)


def _kept_by_turns(rope: RopeParameters) -> Tensor:
    """YaRN's: 1 up to the frequency that turns `beta_fast` times within the trained context, 0 from `beta_slow` on, and
    between these linear in the frequency's number."""
    scaling = rope.scaling
    assert scaling is not None

    def number_of(turns: float) -> float:
        return rope.dim * math.log(scaling.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = number_of(scaling.beta_fast), number_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    numbers = torch.arange(rope.dim // 2, dtype=torch.float32)
    return 1 - ((numbers - low) / (max(high - low, 0) or 0.001)).clamp(0, 1)
