"""Self-attention with rotary positions; where keys come from is the plan's affair."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from headway.models.attention import attention
from headway.models.config import ModelConfig
from headway.models.layers.context import ForwardContext
from headway.models.layers.linear import Linear
from headway.models.layers.norm import RMSNorm
from headway.models.layers.rope import rotate
from headway.models.packed import AttentionPlan

Attend = Callable[["SelfAttention", Tensor, Tensor, Tensor, AttentionPlan], Tensor]


class SelfAttention(nn.Module):
    """`qk_norm`: queries and keys are normalized per head before they are rotated (Qwen3)."""

    def __init__(self, config: ModelConfig, layer: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.layer = layer
        self.attend: Attend = attend
        self.head_dim = config.head_dim
        bias = config.attention_bias
        self.q_proj = Linear(config.width, config.heads * config.head_dim, bias)
        self.k_proj = Linear(config.width, config.kv_heads * config.head_dim, bias)
        self.v_proj = Linear(config.width, config.kv_heads * config.head_dim, bias)
        self.o_proj = Linear(config.heads * config.head_dim, config.width, bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        gate = context.adapter_gate
        heads = (x_TD.shape[0], -1, self.head_dim)
        q_THD: Tensor = self.q_proj(x_TD, gate).view(heads)
        k_TKD: Tensor = self.k_proj(x_TD, gate).view(heads)
        v_TKD: Tensor = self.v_proj(x_TD, gate).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        q_THD = rotate(q_THD, context.cos, context.sin)
        k_TKD = rotate(k_TKD, context.cos, context.sin)
        mixed_THD = self.attend(self, q_THD, k_TKD, v_TKD, context.plan)
        out_TD: Tensor = self.o_proj(mixed_THD.flatten(1), gate)
        return out_TD


def attend(module: SelfAttention, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: AttentionPlan) -> Tensor:
    return attention(q_THD, k_TKD, v_TKD, plan, module.layer)


@cache
def attend_uncompiled() -> Attend:
    """`attend`, hidden from torch's compiler, which would start anew for every plan and every number of a layer.

    One object for all layers, since another object would be another compilation, too.
    """
    hidden: Attend = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]  # has no types
    return hidden
