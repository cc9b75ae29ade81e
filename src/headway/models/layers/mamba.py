"""Mamba-2: a mixer whose memory of a sequence is a state per head that decays (Nemotron-H)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.models import ops
from headway.models.configs.recurrent import MambaShape
from headway.models.layers.context import ForwardContext
from headway.models.layers.convolution import ShortConvolution
from headway.models.layers.linear import Linear
from headway.models.layers.sent import SentParameters
from headway.models.packed import States


class GroupNorm(SentParameters):
    """Root-mean-square norm of each of some groups of the last axis, after a gate."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x_TI: Tensor, gate_TI: Tensor) -> Tensor:
        """In float32; returns `gate`'s precision."""
        x_TGI = (x_TI.float() * F.silu(gate_TI.float())).view(len(x_TI), self.groups, -1)
        normed = F.rms_norm(x_TGI, x_TGI.shape[-1:], eps=self.eps).flatten(-2)
        return (self.sent(self.weight) * normed).to(gate_TI.dtype)


class Mamba(SentParameters):
    """One projection makes everything. Values, inputs and readings pass a short convolution, then the scan."""

    def __init__(self, width: int, shape: MambaShape, index: int, norm_eps: float) -> None:
        super().__init__()
        self.shape, self.index = shape, index
        self.in_proj = Linear(width, shape.inner + shape.channels + shape.heads, shape.bias)
        self.conv1d = ShortConvolution(shape.channels, shape.conv_width, shape.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(shape.heads))
        self.A_log = nn.Parameter(torch.empty(shape.heads))
        self.D = nn.Parameter(torch.empty(shape.heads))
        self.norm = GroupNorm(shape.inner, shape.groups, norm_eps)
        self.out_proj = Linear(shape.inner, width, shape.bias)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        shape = self.shape
        sizes = [shape.inner, shape.channels, shape.heads]
        gate_TI, mixed_TC, step_TH = self.in_proj(x_TD, context.adapter_gate).split(sizes, -1)
        # In float32, whatever the model's precision: decays multiply over a whole sequence.
        step_TH = F.softplus(step_TH.float() + self.sent(self.dt_bias).float()).clamp(min=shape.min_step)
        out_TI = context.plan.recur(self.index, self._recur, (mixed_TC, step_TH))
        out_TD: Tensor = self.out_proj(self.norm(out_TI, gate_TI), context.adapter_gate)
        return out_TD

    def _recur(self, inputs: Sequence[Tensor], lengths: Sequence[int], states: States | None) -> tuple[Tensor, States]:
        """From the plan's tokens and states to outputs and new states: the convolution's tail and the heads' states."""
        (mixed_TC, step_TH), shape = inputs, self.shape
        tail, matrix = (None, None) if states is None else states
        mixed_TC, tail = self.conv1d(mixed_TC, lengths, tail)
        sizes = [shape.inner, shape.groups * shape.state_size, shape.groups * shape.state_size]
        x_TI, b, c = mixed_TC.split(sizes, -1)
        x_THP = x_TI.view(len(x_TI), -1, shape.head_dim)
        b_TGN, c_TGN = (x.view(len(x), -1, shape.state_size) for x in (b, c))
        rate_H = -self.sent(self.A_log).float().exp()
        out_THP, matrix = ops.ssd_scan(x_THP, step_TH, rate_H, b_TGN, c_TGN, lengths, matrix)
        return (out_THP + self.sent(self.D).float().unsqueeze(-1) * x_THP.float()).flatten(1), (tail, matrix)
