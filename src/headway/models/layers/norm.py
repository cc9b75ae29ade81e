"""Root-mean-square norm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.models.kernels import fused, serving
from headway.models.native import ops
from headway.models.native.library import native


class RMSNorm(nn.Module):
    """Normalizes the last axis; the statistics are float32 whatever the input is."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2 and native(x):
            return ops.rms_norm(x, self.weight, self.eps)
        if x.dim() == 2 and serving(x):
            from headway.models.kernels.rows import rms_norm

            return rms_norm(x, self.weight, self.eps)
        if x.dim() == 2 and fused(x):
            from headway.models.kernels.norm import rms_norm as rms_norm_trained

            return rms_norm_trained(x, self.weight, self.eps)
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def added(self, stream_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The stream with `delta` added to it, and the norm of that: between two parts of a block."""
        if native(stream_TD):
            return ops.added_norm(stream_TD, delta_TD, self.weight, self.eps)
        if serving(stream_TD):
            from headway.models.kernels.rows import added_norm

            return added_norm(stream_TD, delta_TD, self.weight, self.eps)
        if fused(stream_TD):
            from headway.models.kernels.norm import added_norm as added_norm_trained

            return added_norm_trained(stream_TD, delta_TD, self.weight, self.eps)
        stream_TD = stream_TD + delta_TD
        return stream_TD, F.rms_norm(stream_TD, self.shape, self.weight, self.eps)
