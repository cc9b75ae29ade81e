"""The gated MLP of dense layers."""

from torch import Tensor, nn

from headway.models import ops
from headway.models.layers.context import ForwardContext
from headway.models.layers.linear import FusedProjections, Linear


class GatedMlp(nn.Module):
    def __init__(self, width: int, mlp_width: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(width, mlp_width, bias)
        self.up_proj = Linear(width, mlp_width, bias)
        self.down_proj = Linear(mlp_width, width, bias)
        self.projections = FusedProjections(self.gate_proj, self.up_proj)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        out: Tensor = self.down_proj(self.hidden(x_TD, context), context.adapter_gate)
        return out

    def hidden(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """The input of the last layer."""
        return ops.gated_silu(*self.projections.fused(x_TD, context.adapter_gate))
