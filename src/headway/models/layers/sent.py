"""Parameters as engines have them: rounded to the precision in which they are sent.

Training keeps all weights in float32. Most are rounded where they are multiplied; what norms, recurrences and routers
compute with in float32 would not be, and the trainer would compute with numbers that no engine has. In FP8 that is
enough for a mismatch as large as FP8's own error, since activations that differ at all round to other numbers in layer
after layer.
"""

from typing import Any

import torch
from torch import Tensor, nn


class SentParameters(nn.Module):
    """A module that computes with some of its parameters in float32, and reads these by `sent`."""

    compute_dtype: torch.dtype | None = None
    """The precision of computation, in which weights are sent; None: that of the weights."""

    def sent(self, parameter: Tensor) -> Tensor:
        """The parameter rounded as it is sent, in its own precision; it gets the gradient of the result."""
        if self.compute_dtype is None or parameter.dtype is self.compute_dtype:
            return parameter
        rounded: Tensor = _Rounded.apply(parameter, self.compute_dtype)  # type: ignore[no-untyped-call]  # torch has no types here
        return rounded


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        return parameter.to(dtype).to(parameter.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
