"""Self-attention with rotary positions; where keys come from is the plan's affair."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from headway.models import ops
from headway.models.attention import attention
from headway.models.config import ModelConfig
from headway.models.layers.context import ForwardContext
from headway.models.layers.linear import FusedProjections, Linear
from headway.models.layers.norm import RMSNorm
from headway.models.packed import AttentionPlan, CachePlan

Attend = Callable[["SelfAttention", Tensor, Tensor, Tensor, AttentionPlan], Tensor]


class SelfAttention(nn.Module):
    """`qk_norm`: queries and keys are normalized per head before they are rotated (Qwen3)."""

    def __init__(self, config: ModelConfig, layer: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.layer = layer
        self.attend: Attend = attend
        self.heads, self.head_dim = config.heads, config.head_dim
        bias = config.attention_bias
        self.q_proj = Linear(config.width, config.heads * config.head_dim, bias)
        self.k_proj = Linear(config.width, config.kv_heads * config.head_dim, bias)
        self.v_proj = Linear(config.width, config.kv_heads * config.head_dim, bias)
        self.o_proj = Linear(config.heads * config.head_dim, config.width, bias)
        self.projections = FusedProjections(self.q_proj, self.k_proj, self.v_proj)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        if isinstance(context.plan, CachePlan):
            q_THD, k_TKD, v_TKD = self._project(x_TD, context)
            mixed_THD = context.plan.attend_unturned(
                q_THD, k_TKD, v_TKD, *self._norms(), context.cos, context.sin, self.layer
            )
        else:
            q_THD, k_TKD, v_TKD = self.queries_keys_values(x_TD, context)
            mixed_THD = self.attend(self, q_THD, k_TKD, v_TKD, context.plan)
        out_TD: Tensor = self.o_proj(mixed_THD.flatten(1), context.adapter_gate)
        return out_TD

    def queries_keys_values(self, x_TD: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """As `PackedPlan` takes them: with their positions."""
        norms, eps = self._norms()
        if norms is None:
            q_THD, k_TKD, v_TKD = self._project(x_TD, context)
            return *ops.qk_norm_rope(q_THD, k_TKD, None, eps, context.cos, context.sin), v_TKD
        heads = (len(x_TD), -1, self.head_dim)
        parts = [x.view(heads) for x in self.projections.fused(x_TD, context.adapter_gate)]
        if len(parts) == 1:
            return ops.qkv_norm_rope(parts[0], self.heads, norms, eps, context.cos, context.sin)
        return *ops.qk_norm_rope(parts[0], parts[1], norms, eps, context.cos, context.sin), parts[2]

    def _project(self, x_TD: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        heads = (x_TD.shape[0], -1, self.head_dim)
        q_THD, k_TKD, v_TKD = (x.view(heads) for x in self.projections(x_TD, context.adapter_gate))
        return q_THD, k_TKD, v_TKD

    def _norms(self) -> tuple[tuple[Tensor, Tensor] | None, float]:
        """The weights of the norms of queries and keys, and what they add to the mean square."""
        if self.q_norm is None or self.k_norm is None:
            return None, 0.0
        return (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps


def attend(module: SelfAttention, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: AttentionPlan) -> Tensor:
    return attention(q_THD, k_TKD, v_TKD, plan, module.layer)


@cache
def attend_uncompiled() -> Attend:
    """`attend`, hidden from torch's compiler, which would start anew for every plan and every number of a layer.

    One object for all layers, since another object would be another compilation, too.
    """
    hidden: Attend = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]  # has no types
    return hidden
