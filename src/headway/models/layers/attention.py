"""Self-attention with rotary positions. Where keys come from is up to the plan."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from headway.models import ops
from headway.models.config import ModelConfig
from headway.models.layers.context import ForwardContext
from headway.models.layers.linear import FusedProjections, Linear
from headway.models.layers.norm import RMSNorm
from headway.models.ops.attention import QKV
from headway.models.packed import AttentionLayer, Rope


class SelfAttention(nn.Module):
    """`qk_norm`: queries and keys are normalized per head before they are rotated (Qwen3). For `window`, `sinks` (here:
    whether the layer has that parameter) and `scale` see `AttentionLayer`."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        qk_norm: bool,
        window: int | None = None,
        sinks: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        bias = config.attention_bias
        self.q_proj = Linear(config.width, config.heads * config.head_dim, bias)
        self.k_proj = Linear(config.width, config.kv_heads * config.head_dim, bias)
        self.v_proj = Linear(config.width, config.kv_heads * config.head_dim, bias)
        self.o_proj = Linear(config.heads * config.head_dim, config.width, bias)
        self.projections = FusedProjections(self.q_proj, self.k_proj, self.v_proj)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(config.heads)) if sinks else None
        self._layer = AttentionLayer(index, window, scale=scale)

    @property
    def layer(self) -> AttentionLayer:
        """This layer as plans see it, with the live sinks: sharding replaces parameters."""
        return self._layer if self.sinks is None else replace(self._layer, sinks=self.sinks)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        return self.output(self.attend(x_TD, context), context)

    def attend(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Project and attend, without the output projection: (T, H, D)."""
        rope = self._rope(context)
        if (qkv := self._project_fused(x_TD, context, rope)) is not None:
            return context.plan.attend(*qkv, self.layer)
        return context.plan.attend_pre_rope(*self._project(x_TD, context), rope, self.layer)

    def project(self, x_TD: Tensor, context: ForwardContext) -> QKV:
        """Queries, keys and values as `AttentionPlan.attend` takes them."""
        rope = self._rope(context)
        if (qkv := self._project_fused(x_TD, context, rope)) is not None:
            return qkv
        q_THD, k_TKD, v_TKD = self._project(x_TD, context)
        return *ops.qk_norm_rope(q_THD, k_TKD, *rope), v_TKD

    def output(self, attended_THD: Tensor, context: ForwardContext) -> Tensor:
        out_TD: Tensor = self.o_proj(attended_THD.flatten(1), context.adapter_gate)
        return out_TD

    def _project(self, x_TD: Tensor, context: ForwardContext) -> QKV:
        heads = (len(x_TD), -1, self.head_dim)
        q_THD, k_TKD, v_TKD = (x.view(heads) for x in self.projections(x_TD, context.adapter_gate))
        return q_THD, k_TKD, v_TKD

    def _project_fused(self, x_TD: Tensor, context: ForwardContext, rope: Rope) -> QKV | None:
        """`project` by way of one tensor with all heads, where that is faster in training; else None."""
        if rope.norms is None or not self.projections.prefers_fused(x_TD, context.adapter_gate):
            return None
        x_TO = self.projections.fused(x_TD)
        return ops.qkv_norm_rope(x_TO.view(len(x_TD), -1, self.head_dim), self.heads, rope.norms, *rope[1:])

    def _rope(self, context: ForwardContext) -> Rope:
        if self.q_norm is None or self.k_norm is None:
            return Rope(None, 0.0, context.cos, context.sin)
        return Rope((self.q_norm.weight, self.k_norm.weight), self.q_norm.eps, context.cos, context.sin)
