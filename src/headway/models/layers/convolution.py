"""The short convolution that recurrent mixers begin with."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headway.models import ops


class ShortConvolution(nn.Module):
    """A causal convolution of each channel by itself, over packed samples, then SiLU."""

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(
        self, x_TC: Tensor, lengths: Sequence[int], tails_SWC: Tensor | None, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run `ops.causal_conv`."""
        return ops.causal_conv(x_TC, self.weight, self.bias, lengths, tails_SWC, dtype)
