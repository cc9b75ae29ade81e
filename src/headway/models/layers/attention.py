"""Self-attention with rotary positions; where keys come from is the plan's affair."""

from torch import Tensor, nn

from headway.models.attention import attention
from headway.models.config import ModelConfig
from headway.models.layers.context import ForwardContext
from headway.models.layers.linear import Linear
from headway.models.layers.norm import RMSNorm
from headway.models.layers.rope import rotate


class SelfAttention(nn.Module):
    """`qk_norm`: queries and keys are normalized per head before they are rotated (Qwen3)."""

    def __init__(self, config: ModelConfig, layer: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.layer = layer
        self.attend = attention
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
        mixed_THD = self.attend(q_THD, k_TKD, v_TKD, context.plan, self.layer)
        out_TD: Tensor = self.o_proj(mixed_THD.flatten(1), gate)
        return out_TD
