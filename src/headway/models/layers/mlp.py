"""The second stage of a block: its interface, and the MLPs of dense layers."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.models import ops
from headway.models.layers.context import ForwardContext
from headway.models.layers.linear import FusedProjections, Linear
from headway.models.layers.norm import RMSNorm
from headway.models.ops.fp8.blocks import keep_blocks


def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": relu_squared,
}
"""By their names in config.json."""


class FeedForward(nn.Module):
    """A function of each row by itself. Subclasses override `forward`."""

    splits_rows = True
    """Rows may be computed in portions without loss of speed: every row takes the same weights."""

    def forward(
        self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the output, and the experts (T, k) that were used, None for a dense layer.

        `given` are the experts to use, -1 where the router chooses.
        """
        raise NotImplementedError(f"{type(self).__name__} must override forward")

    def add_and_norm(
        self, stream_TD: Tensor, x_TD: Tensor, norm: RMSNorm, context: ForwardContext, given_Tk: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the stream with the output added to it, `norm` of that, and the experts that were used."""
        out_TD, used_Tk = self(x_TD, context, given_Tk)
        return *norm.add_and_norm(stream_TD, out_TD), used_Tk

    def grad_only(self, x_TD: Tensor, context: ForwardContext, used_Tk: Tensor | None) -> Tensor:
        """Return a tensor with the gradients of the output, whose values are of no interest."""
        out_TD: Tensor = self(x_TD, context, used_Tk)[0]
        return out_TD


class GatedMlp(FeedForward):
    """activation(gate) * up, by name."""

    def __init__(self, width: int, mlp_width: int, bias: bool = False, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(width, mlp_width, bias)
        self.up_proj = Linear(width, mlp_width, bias)
        self.down_proj = Linear(mlp_width, width, bias)
        self.projections = FusedProjections(self.gate_proj, self.up_proj)

    def forward(self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None) -> tuple[Tensor, None]:
        return self.down_proj(self.hidden(x_TD, context), context.adapter_gate), None

    def add_and_norm(
        self, stream_TD: Tensor, x_TD: Tensor, norm: RMSNorm, context: ForwardContext, given_Tk: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The last sums of the last product are made with the stream's."""
        if type(self) is not GatedMlp:  # a subclass may do more with its output
            return super().add_and_norm(stream_TD, x_TD, norm, context, given_Tk)
        out = self.down_proj.summands(self.hidden(x_TD, context), context.adapter_gate)
        return *norm.add_and_norm(stream_TD, out), None

    def grad_only(self, x_TD: Tensor, context: ForwardContext, used_Tk: Tensor | None) -> Tensor:
        """The last product is not computed."""
        return self.down_proj.grad_only(self.hidden(x_TD, context), context.adapter_gate)

    def hidden(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """The input of the last layer."""
        if self.activation != "silu":
            gate_TM, up_TM = self.projections(x_TD, context.adapter_gate)
            return ACTIVATIONS[self.activation](gate_TM) * up_TM
        if self.projections.prefers_fused(x_TD, context.adapter_gate):
            return ops.gated_silu(self.projections.fused(x_TD, context.adapter_gate))
        gate_TM, up_TM = self.projections(x_TD, context.adapter_gate)
        if self.down_proj.fp8 and torch.is_inference_mode_enabled():
            return keep_blocks(*ops.gated_silu_fp8(gate_TM, up_TM))
        return ops.gated_silu(gate_TM, up_TM)


class Mlp(FeedForward):
    """Two layers with an activation between them, without a gate (Nemotron)."""

    def __init__(self, width: int, mlp_width: int, bias: bool = False, activation: str = "relu2") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up_proj = Linear(width, mlp_width, bias)
        self.down_proj = Linear(mlp_width, width, bias)

    def forward(self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None) -> tuple[Tensor, None]:
        hidden_TM = self.activation(self.up_proj(x_TD, context.adapter_gate))
        return self.down_proj(hidden_TM, context.adapter_gate), None

    def grad_only(self, x_TD: Tensor, context: ForwardContext, used_Tk: Tensor | None) -> Tensor:
        """The last product is not computed."""
        hidden_TM = self.activation(self.up_proj(x_TD, context.adapter_gate))
        return self.down_proj.grad_only(hidden_TM, context.adapter_gate)
