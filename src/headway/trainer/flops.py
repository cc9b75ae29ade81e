"""Floating-point operations of a training step, and the share of the device's peak that they make (MFU).

Counted are the model's own: a multiply and an add per weight and token forward, twice that backward; causal
attention over each sample by its own length; the head on the tokens that have a loss. Recomputation doesn't count.
"""

import torch

from headway.models.decoder import DecoderLM

# Dense bf16 peaks, in FLOP/s, by a part of the device's name.
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "B100": 1750e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


class FlopCounter:
    """Per token of the body, per row of the head, per pair of tokens that attend."""

    def __init__(self, model: DecoderLM) -> None:
        config = model.config
        body = sum(p.numel() for name, p in model.model.layers.named_parameters() if p.ndim == 2 and "lora" not in name)
        stacked = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 3)
        active = body + (stacked * config.experts_per_token / config.experts if config.experts else 0)
        # Frozen weights pass a gradient on but get none: forward and one product backward.
        passes = 3 if model.head_weight().requires_grad else 2
        self._per_token = passes * 2 * active
        self._per_row = passes * 2 * config.vocab_size * config.width
        # Scores and their weighted sum: 2 products of head_dim per pair and head; half of all pairs are causal.
        self._per_square = 3 * 2 * config.layers * config.heads * config.head_dim

    def of(self, lengths: list[int], rows: int) -> float:
        squares = float(sum(n * n for n in lengths))
        return self._per_token * sum(lengths) + self._per_row * rows + self._per_square * squares


def peak_flops(device: torch.device) -> float | None:
    """Of one device; None where it isn't known, as on CPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
