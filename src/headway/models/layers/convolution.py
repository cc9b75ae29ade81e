"""The short convolution that recurrent mixers begin with."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headway.models import ops
from headway.models.layers.sent import SentParameters
from headway.models.ops.recurrent.slots import State


class ShortConvolution(SentParameters):
    """A causal convolution of each channel by itself, over packed samples, then SiLU."""

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(
        self, x_TC: Tensor, lengths: Sequence[int], tails_SWC: State | None, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, State]:
        """Run `ops.causal_conv`."""
        bias_C = None if self.bias is None else self.sent(self.bias)
        return ops.causal_conv(x_TC, self.sent(self.weight), bias_C, lengths, tails_SWC, dtype)
