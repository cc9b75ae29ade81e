"""The gated MLP of dense layers."""

import torch.nn.functional as F
from torch import Tensor, nn

from headway.models.kernels import fused, serving
from headway.models.layers.context import ForwardContext
from headway.models.layers.linear import Linear, Siblings
from headway.models.native import ops
from headway.models.native.library import native


class GatedMlp(nn.Module):
    def __init__(self, width: int, mlp_width: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(width, mlp_width, bias)
        self.up_proj = Linear(width, mlp_width, bias)
        self.down_proj = Linear(mlp_width, width, bias)
        self.siblings = Siblings(self.gate_proj, self.up_proj)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        out: Tensor = self.down_proj(self.hidden(x_TD, context), context.adapter_gate)
        return out

    def hidden(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """What the last layer gets."""
        if (both_TM := self.siblings.together(x_TD, context.adapter_gate)) is not None:
            from headway.models.kernels.gated import gated_halves

            return gated_halves(both_TM)
        return gated_silu(*self.siblings(x_TD, context.adapter_gate))


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if gate.dim() == 2 and serving(gate):
        from headway.models.kernels.rows import gated_silu as gated_silu_rows

        return gated_silu_rows(gate, up)
    if fused(gate):
        from headway.models.kernels.gated import gated_silu as gated_silu_fused

        return gated_silu_fused(gate, up)
    if native(gate):
        return ops.gated_silu(gate, up)
    return F.silu(gate) * up
