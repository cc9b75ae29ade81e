"""The gradient of gated rows whose results are weighted afterwards: the middle of an expert's backward pass."""

import torch
from torch import Tensor

from headway.models.ops.registry import Op, in_triton


@Op
def gated_gradient(wide_NM: Tensor, grad_NI: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `wide` and of the weights, and weight * hidden itself, from the gradient of that; hidden
    is silu(gate) * up of the halves of `wide`."""
    gate_NI, up_NI = wide_NM.float().chunk(2, -1)
    sigmoid_NI = gate_NI.sigmoid()
    active_NI = gate_NI * sigmoid_NI
    hidden_NI = active_NI * up_NI
    weights_N1 = weights_N.float().unsqueeze(-1)
    scaled_NI = grad_NI * weights_N1
    by_gate_NI = scaled_NI * up_NI * sigmoid_NI * (1 + gate_NI * (1 - sigmoid_NI))
    grad_NM = torch.cat([by_gate_NI, scaled_NI * active_NI], -1)
    by_weight_N = (hidden_NI * grad_NI).sum(-1)
    return grad_NM.to(wide_NM.dtype), by_weight_N.to(weights_N.dtype), (hidden_NI * weights_N1).to(wide_NM.dtype)


gated_gradient.backend("triton", takes=in_triton)("headway.models.ops.triton.gated_gradient:gated_gradient")
