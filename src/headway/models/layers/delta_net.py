"""Gated delta net: a mixer whose memory of a sequence is one matrix per head (Qwen3-Next, Qwen3.5)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.models import ops
from headway.models.configs.recurrent import DeltaNetShape
from headway.models.layers.context import ForwardContext
from headway.models.layers.convolution import ShortConvolution
from headway.models.layers.linear import FusedProjections, Linear
from headway.models.layers.norm import RMSNorm
from headway.models.layers.sent import SentParameters
from headway.models.ops.recurrent.chunks import precision
from headway.models.packed import States

Projected = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys and values side by side (T, channels); the output's gate (T, heads, values); the logits of how much a
token is written (T, heads), and what its decay follows from (T, heads)."""


class GatedDeltaNet(SentParameters):
    """Four projections (Qwen3.5). Queries, keys and values pass a short convolution, then the gated delta rule."""

    def __init__(self, width: int, shape: DeltaNetShape, index: int, norm_eps: float) -> None:
        super().__init__()
        self.shape, self.index = shape, index
        self._add_projections(width)
        self.conv1d = ShortConvolution(shape.channels, shape.conv_width)
        self.dt_bias = nn.Parameter(torch.empty(shape.value_heads))
        self.A_log = nn.Parameter(torch.empty(shape.value_heads))
        self.norm = RMSNorm(shape.value_dim, norm_eps)
        self.out_proj = Linear(shape.values, width)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        qkv_TC, gate_THV, write_TH, step_TH = self.project(x_TD, context)
        # In float32, whatever the model's precision: decays multiply over a whole sequence, and the norm magnifies
        # what is rounded before it.
        rate_H, bias_H = self.sent(self.A_log).float().exp(), self.sent(self.dt_bias).float()
        decay_TH = -rate_H * F.softplus(step_TH.float() + bias_H)
        beta_TH = write_TH.float().sigmoid().to(precision(x_TD))
        out_THV = context.plan.recur(self.index, self._recur, (qkv_TC, decay_TH, beta_TH))
        normed_THV = self.norm(out_THV) * F.silu(gate_THV.float())
        out_TD: Tensor = self.out_proj(normed_THV.to(x_TD.dtype).flatten(1), context.adapter_gate)
        return out_TD

    def project(self, x_TD: Tensor, context: ForwardContext) -> Projected:
        qkv_TC, gate_TV, write_TH, step_TH = self.projections(x_TD, context.adapter_gate)
        return qkv_TC, gate_TV.view(len(x_TD), -1, self.shape.value_dim), write_TH, step_TH

    def _add_projections(self, width: int) -> None:
        shape = self.shape
        self.in_proj_qkv = Linear(width, shape.channels)
        self.in_proj_z = Linear(width, shape.values)
        self.in_proj_b = Linear(width, shape.value_heads)
        self.in_proj_a = Linear(width, shape.value_heads)
        self.projections = FusedProjections(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a, wide=True)

    def _recur(self, inputs: Sequence[Tensor], lengths: Sequence[int], states: States | None) -> tuple[Tensor, States]:
        """From the plan's tokens and states to outputs and new states: the convolution's tail and the matrices."""
        (qkv_TC, decay_TH, beta_TH), shape = inputs, self.shape
        tail, matrix = (None, None) if states is None else states
        qkv_TC, tail = self.conv1d(qkv_TC, lengths, tail, beta_TH.dtype)
        keys = shape.key_heads * shape.key_dim
        q, k, v = qkv_TC.split([keys, keys, shape.values], -1)
        q_TKD, k_TKD = (x.view(len(x), -1, shape.key_dim) for x in (q, k))
        v_THV = v.view(len(v), -1, shape.value_dim)
        out_THV, matrix = ops.gated_delta_rule(q_TKD, k_TKD, v_THV, decay_TH, beta_TH, lengths, matrix)
        return out_THV, (tail, matrix)


class GroupedDeltaNet(GatedDeltaNet):
    """Two projections, whose outputs lie together by key head (Qwen3-Next)."""

    def project(self, x_TD: Tensor, context: ForwardContext) -> Projected:
        shape, tokens = self.shape, len(x_TD)
        by_head, scalars = self.projections(x_TD, context.adapter_gate)
        each = shape.value_heads // shape.key_heads
        sizes = [shape.key_dim, shape.key_dim, each * shape.value_dim, each * shape.value_dim]
        q, k, v, gate = torch.split(by_head.view(tokens, shape.key_heads, -1), sizes, -1)
        write, step = scalars.view(tokens, shape.key_heads, -1).chunk(2, -1)
        qkv_TC = torch.cat([x.flatten(1) for x in (q, k, v)], -1)
        return qkv_TC, gate.reshape(tokens, -1, shape.value_dim), write.flatten(1), step.flatten(1)

    def _add_projections(self, width: int) -> None:
        shape = self.shape
        self.in_proj_qkvz = Linear(width, shape.channels + shape.values)
        self.in_proj_ba = Linear(width, 2 * shape.value_heads)
        self.projections = FusedProjections(self.in_proj_qkvz, self.in_proj_ba, wide=True)
