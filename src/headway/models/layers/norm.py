"""Norms of the last axis."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.models import ops
from headway.models.layers.sent import SentParameters
from headway.models.ops.fp8.blocks import keep_blocks


class RMSNorm(SentParameters):
    """Normalize the last axis; the weight may be of a higher precision than the input."""

    neutral = 1.0
    """The weight that scales nothing, with which training from scratch starts."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.fp8 = False
        """The normed rows go into layers in FP8: serving passes quantize them here."""
        self.weight = nn.Parameter(torch.empty(size))

    @property
    def scale(self) -> Tensor:
        """The factors of the normalized numbers."""
        return self.sent(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.scale, self.eps)

    def add_and_norm(self, stream_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The stream with `delta` added to it, and the norm of that: between two stages of a block."""
        if not (self.fp8 and torch.is_inference_mode_enabled()):
            return ops.add_rms_norm(stream_TD, delta_TD, self.scale, self.eps)
        stream_TD, normed_TD, blocks = ops.add_rms_norm_fp8(stream_TD, delta_TD, self.scale, self.eps)
        return stream_TD, keep_blocks(normed_TD, blocks)


class ZeroCenteredRMSNorm(RMSNorm):
    """The factor is 1 + weight (Gemma, Qwen3-Next), in float32: next to 1, bfloat16 would drop most of a weight."""

    neutral = 0.0

    @property
    def scale(self) -> Tensor:
        return 1 + self.sent(self.weight).float()


class LayerNorm(SentParameters):
    """Normalize the last axis to mean 0 and spread 1, in float32; weights may be more precise than the input."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.sent(self.weight).float(), self.sent(self.bias).float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(x.dtype)
