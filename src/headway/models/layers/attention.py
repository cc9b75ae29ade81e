"""Self-attention with rotary positions. Where keys come from is up to the plan."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headway.models import ops
from headway.models.configs.config import ModelConfig
from headway.models.layers.context import ForwardContext
from headway.models.layers.linear import FusedProjections, Linear
from headway.models.layers.norm import RMSNorm
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.packed import QKV
from headway.models.packed import Rope

QkNorm = bool | Literal["all"]
"""Norms of queries and keys before they are rotated: none, one per head (Qwen3), or one over all heads (OLMo 2)."""


class Attention(nn.Module):
    """The interface of a block's attention: `output(attend(x))`, where `attend` may be `project` and then the plan's
    own attention."""

    @property
    def separable(self) -> bool:
        """Tell if this is `project`, the plan's attention and `output`, which may then be run, and recomputed, one by
        one."""
        return True

    @property
    def layer(self) -> AttentionLayer:
        """This layer as plans see it."""
        raise NotImplementedError(f"{type(self).__name__} must override layer")

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        return self.output(self.attend(x_TD, context), context)

    def summands(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """The output as `RMSNorm.add_and_norm` takes it in serving passes: (T, D), or parts (S, T, D) of it."""
        out_TD: Tensor = self(x_TD, context)
        return out_TD

    def attend(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Project and attend, without the output projection: (T, H, D)."""
        raise NotImplementedError(f"{type(self).__name__} must override attend")

    def project(self, x_TD: Tensor, context: ForwardContext) -> QKV:
        """Queries, keys and values as `AttentionPlan.attend` takes them."""
        raise NotImplementedError(f"{type(self).__name__} must override project")

    def output(self, attended_THD: Tensor, context: ForwardContext) -> Tensor:
        """Project what `attend` returns to the width of the stream."""
        raise NotImplementedError(f"{type(self).__name__} must override output")


class SelfAttention(Attention):
    """Grouped-query attention. `norm` is the class of the norms that `qk_norm` asks for. `rotary` is the number of the
    layer's rotary positions among the family's `ropes`; None: it has none (NoPE). For `window`, `sinks` (here: whether
    the layer has that parameter), `scale` and the config's `softcap` see `AttentionLayer`."""

    gated = False
    """The output is multiplied by a function of the layer's input, so that it is no function of attention's alone."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        qk_norm: QkNorm = False,
        norm: type[RMSNorm] = RMSNorm,
        window: int | None = None,
        sinks: bool = False,
        scale: float | None = None,
        rotary: int | None = 0,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        bias, output_bias = config.attention_bias, config.output_bias
        self.q_proj = Linear(config.width, self.query_outputs(config), bias)
        self.k_proj = Linear(config.width, keys, bias)
        self.v_proj = Linear(config.width, keys, bias)
        self.o_proj = Linear(queries, config.width, bias if output_bias is None else output_bias)
        self.projections = FusedProjections(self.q_proj, self.k_proj, self.v_proj)
        self.normed_together = qk_norm == "all"
        sizes = (queries, keys) if self.normed_together else (config.head_dim, config.head_dim)
        self.q_norm = norm(sizes[0], config.norm_eps) if qk_norm else None
        self.k_norm = norm(sizes[1], config.norm_eps) if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(config.heads)) if sinks else None
        self.rotary = rotary
        self._layer = AttentionLayer(index, window, scale=scale, softcap=config.softcap)

    @property
    def separable(self) -> bool:
        return not self.gated

    @staticmethod
    def query_outputs(config: ModelConfig) -> int:
        """Outputs of `q_proj`."""
        return config.heads * config.head_dim

    @property
    def layer(self) -> AttentionLayer:
        """This layer as plans see it, with the live sinks: sharding replaces parameters."""
        return self._layer if self.sinks is None else replace(self._layer, sinks=self.sinks)

    def attend(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        rope = self._rope(context)
        if rope is None:
            return context.plan.attend(*self.project(x_TD, context), self.layer)
        if (qkv := self._project_fused(x_TD, context, rope)) is not None:
            return context.plan.attend(*qkv, self.layer)
        return context.plan.attend_pre_rope(*self._project(x_TD, context), rope, self.layer)

    def project(self, x_TD: Tensor, context: ForwardContext) -> QKV:
        rope = self._rope(context)
        if rope is None:
            return self._normed(self._project(x_TD, context))
        if (qkv := self._project_fused(x_TD, context, rope)) is not None:
            return qkv
        q_THD, k_TKD, v_TKD = self._project(x_TD, context)
        return *ops.qk_norm_rope(q_THD, k_TKD, *rope), v_TKD

    def output(self, attended_THD: Tensor, context: ForwardContext) -> Tensor:
        out_TD: Tensor = self.o_proj(attended_THD.flatten(1), context.adapter_gate)
        return out_TD

    def summands(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        if type(self) is not SelfAttention:  # a subclass may do more with its output
            return super().summands(x_TD, context)
        return self.o_proj.summands(self.attend(x_TD, context).flatten(1), context.adapter_gate)

    def _project(self, x_TD: Tensor, context: ForwardContext) -> QKV:
        """Queries, keys and values before the norms per head and rotary positions."""
        q_TO, k_TO, v_TO = self.projections(x_TD, context.adapter_gate)
        if self.normed_together:
            assert self.q_norm is not None and self.k_norm is not None
            q_TO, k_TO = self.q_norm(q_TO), self.k_norm(k_TO)
        heads = (len(x_TD), -1, self.head_dim)
        return q_TO.view(heads), k_TO.view(heads), v_TO.view(heads)

    def _project_fused(self, x_TD: Tensor, context: ForwardContext, rope: Rope) -> QKV | None:
        """`project` by way of one tensor with all heads, where that is faster in training; else None."""
        if rope.norms is None or not self.projections.prefers_fused(x_TD, context.adapter_gate):
            return None
        x_TO = self.projections.fused(x_TD, context.adapter_gate)
        return ops.qkv_norm_rope(x_TO.view(len(x_TD), -1, self.head_dim), self.heads, rope.norms, *rope[1:])

    def _normed(self, qkv: QKV) -> QKV:
        if self.q_norm is None or self.k_norm is None or self.normed_together:
            return qkv
        return self.q_norm(qkv[0]), self.k_norm(qkv[1]), qkv[2]

    def _rope(self, context: ForwardContext) -> Rope | None:
        if self.rotary is None:
            return None
        cos, sin = context.rotary[self.rotary]
        if self.q_norm is None or self.k_norm is None or self.normed_together:
            return Rope(None, 0.0, cos, sin)
        return Rope((self.q_norm.scale, self.k_norm.scale), self.q_norm.eps, cos, sin)


class GatedAttention(SelfAttention):
    """Attention whose output is multiplied by `activation` of one more projection of the input, called `gate_name`:
    one number per head (`per_head`) or for each of a head's numbers."""

    gated = True

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        gate_name: str = "gate_proj",
        per_head: bool = False,
        activation: Callable[[Tensor], Tensor] = torch.sigmoid,
        **options: Any,
    ) -> None:
        super().__init__(config, index, **options)
        self.gate_name, self.activation = gate_name, activation
        self.add_module(gate_name, Linear(config.width, config.heads * (1 if per_head else config.head_dim)))

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        gate_TO = self.get_submodule(self.gate_name)(x_TD, context.adapter_gate)
        gate = self.activation(gate_TO.float()).view(len(x_TD), self.heads, -1)
        return self.output((self.attend(x_TD, context) * gate).to(x_TD.dtype), context)


class QueryGatedAttention(SelfAttention):
    """Attention whose output is multiplied by the sigmoid of the second half of what `q_proj` computes for each head
    (Qwen3-Next, Qwen3.5)."""

    gated = True

    @property
    def separable(self) -> bool:
        return not self.gated

    @staticmethod
    def query_outputs(config: ModelConfig) -> int:
        return 2 * config.heads * config.head_dim

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        q_TO, k_TO, v_TO = self.projections(x_TD, context.adapter_gate)
        q_THD, gate_THD = q_TO.view(len(x_TD), self.heads, -1).chunk(2, -1)
        k_TKD, v_TKD = (x.view(len(x_TD), -1, self.head_dim) for x in (k_TO, v_TO))
        rope = self._rope(context)
        if rope is None:
            attended_THD = context.plan.attend(*self._normed((q_THD, k_TKD, v_TKD)), self.layer)
        else:
            attended_THD = context.plan.attend_pre_rope(q_THD, k_TKD, v_TKD, rope, self.layer)
        return self.output((attended_THD * torch.sigmoid(gate_THD.float())).to(x_TD.dtype), context)
