"""Rotary positions: tables in float32, gathered once per forward pass."""

import math

import torch
from torch import Tensor

from headway.models.config import ModelConfig, RopeScaling


class RotaryTable:
    """cos and sin of every position times every frequency, built on a device when it is first needed there.

    Not a module with buffers: a model built on the meta device and materialized later would lose them.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def gather(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, (T, 1, rotary size) in float32, as `ops.rope` takes them."""
        cos, sin = self.table(positions_T.device)
        return cos[positions_T].unsqueeze(1), sin[positions_T].unsqueeze(1)

    def table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and signed sin of all positions, (positions, rotary size)."""
        tables = self._tables.get(device)
        if tables is None:
            tables = self._tables[device] = self._build(device)
        return tables

    @torch.inference_mode(False)
    def _build(self, device: torch.device) -> tuple[Tensor, Tensor]:
        frequencies = inverse_frequencies(self._config)
        angles = torch.arange(self._config.max_len, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    size = config.rotary_dim or config.head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    return frequencies / scaling.factor if scaling.type == "linear" else _stretch_low(frequencies, scaling)


def _stretch_low(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3: slow frequencies are stretched by the factor, fast ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_len / scaling.low_freq_factor
    high = scaling.original_max_len / scaling.high_freq_factor
    stretched = frequencies / scaling.factor
    kept_share = (scaling.original_max_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - kept_share) * stretched + kept_share * frequencies
    return torch.where(wavelengths > low, stretched, torch.where(wavelengths < high, frequencies, between))
