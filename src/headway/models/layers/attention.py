"""Self-attention with rotary positions; where keys come from is the plan's affair."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from headway.models.attention import attention
from headway.models.config import ModelConfig
from headway.models.kernels import fused
from headway.models.layers.context import ForwardContext
from headway.models.layers.linear import Linear, Siblings
from headway.models.layers.norm import RMSNorm
from headway.models.layers.rope import rotate
from headway.models.native import ops
from headway.models.native.library import native
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
        self.siblings = Siblings(self.q_proj, self.k_proj, self.v_proj)
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
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is not None and k_norm is not None:
            x_TO = self.siblings.together(x_TD, context.adapter_gate)
            if x_TO is not None:
                from headway.models.kernels.turned import Turn, turned_together

                turn = Turn(q_norm.weight, k_norm.weight, q_norm.eps, context.cos, context.sin)
                return turned_together(x_TO.view(len(x_TO), -1, self.head_dim), self.heads, turn)
        q_THD, k_TKD, v_TKD = self._project(x_TD, context)
        return *self._turn(q_THD, k_TKD, context.cos, context.sin), v_TKD

    def _project(self, x_TD: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        heads = (x_TD.shape[0], -1, self.head_dim)
        q_THD, k_TKD, v_TKD = (x.view(heads) for x in self.siblings(x_TD, context.adapter_gate))
        return q_THD, k_TKD, v_TKD

    def _turn(self, q_THD: Tensor, k_TKD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys at their positions."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if native(q_THD):
            return ops.turn(q_THD, k_TKD, *self._norms(), cos, sin)
        if q_norm is not None and k_norm is not None:
            if fused(q_THD):
                from headway.models.kernels.turned import Turn, turned

                return turned(q_THD, k_TKD, Turn(q_norm.weight, k_norm.weight, q_norm.eps, cos, sin))
            q_THD, k_TKD = q_norm(q_THD), k_norm(k_TKD)
        return rotate(q_THD, cos, sin), rotate(k_TKD, cos, sin)

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
