"""Latent attention (MLA): keys and values of all heads are made from one compressed row per token."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from headway.models import ops
from headway.models.configs.latent import LatentConfig
from headway.models.layers.attention import Attention
from headway.models.layers.context import ForwardContext
from headway.models.layers.indexer import Indexer
from headway.models.layers.linear import FusedProjections, Linear
from headway.models.layers.norm import RMSNorm
from headway.models.layers.rope import pairs_to_halves
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.packed import QKV

_EPS = 1e-6
"""Of the norms of compressed rows, whatever the config says of others."""


class LatentAttention(Attention):
    """Attention of DeepSeek-V2 and V3 (https://arxiv.org/abs/2405.04434), optionally over the tokens that an `indexer`
    chooses, its own or that of an earlier layer.

    A token's row has `kv_rank` numbers, from which `kv_b_proj` makes keys and values, and `rope_dim` rotated ones that
    the keys of all heads share. In training these are computed. For a plan that caches rows, `kv_b_proj` is multiplied
    into queries and outputs instead, so that the row itself is the one key of all heads, and its first part the value.
    """

    def __init__(self, config: LatentConfig, index: int) -> None:
        super().__init__()
        width, bias = config.width, config.attention_bias
        self.heads, self.kv_rank = config.heads, config.kv_rank
        self.nope_dim, self.rope_dim, self.v_dim = config.nope_dim, config.rope_dim, config.v_dim
        self.interleaved, self.q_rank = config.rope_interleave, config.q_rank
        queries = config.heads * config.head_dim
        if config.q_rank is None:
            self.q_proj = Linear(width, queries)
        else:
            self.q_a_proj = Linear(width, config.q_rank, bias)
            self.q_a_layernorm = RMSNorm(config.q_rank, _EPS)
            self.q_b_proj = Linear(config.q_rank, queries)
        self.kv_a_proj_with_mqa = Linear(width, config.kv_rank + config.rope_dim, bias)
        self.kv_a_layernorm = RMSNorm(config.kv_rank, _EPS)
        self.kv_b_proj = Linear(config.kv_rank, config.heads * (config.nope_dim + config.v_dim))
        # Its weight is also multiplied into queries and outputs, in the precision of the stream.
        self.kv_b_proj.takes_fp8 = False
        self.o_proj = Linear(config.heads * config.v_dim, width, bias)
        first = self.q_proj if config.q_rank is None else self.q_a_proj
        self.projections = FusedProjections(first, self.kv_a_proj_with_mqa)
        self.chosen_by = config.chosen_by(index)
        self.indexer = Indexer(config) if self.chosen_by == index else None
        # Plans divide scores by √head size; queries bring the rest of the layer's own scale.
        self._scale = config.sharpness
        self._latent_scale = config.sharpness * math.sqrt((config.kv_rank + config.rope_dim) / config.head_dim)
        self._layer = AttentionLayer(index)

    @property
    def layer(self) -> AttentionLayer:
        return self._layer

    @property
    def separable(self) -> bool:
        return self.chosen_by is None

    def attend(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        query_TR, row_TR = self._compress(x_TD, context)
        layer = self._layer
        if self.chosen_by is not None and (chosen := self._choose(x_TD, query_TR, context)) is not None:
            layer = replace(layer, chosen=chosen)
        if context.plan.takes_latent_keys:
            return self._attend_latent(query_TR, row_TR, context, layer)
        return context.plan.attend(*self._expand(query_TR, row_TR, context), layer)

    def project(self, x_TD: Tensor, context: ForwardContext) -> QKV:
        return self._expand(*self._compress(x_TD, context), context)

    def output(self, attended_THD: Tensor, context: ForwardContext) -> Tensor:
        out_TD: Tensor = self.o_proj(attended_THD.flatten(1), context.adapter_gate)
        return out_TD

    def _compress(self, x_TD: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Queries, compressed where they ever are, and a token's row."""
        query_TR, row_TR = self.projections(x_TD, context.adapter_gate)
        return query_TR if self.q_rank is None else self.q_a_layernorm(query_TR), row_TR

    def _expand(self, query_TR: Tensor, row_TR: Tensor, context: ForwardContext) -> QKV:
        """Queries, keys and values of every head."""
        q_nope, q_rope = self._queries(query_TR, context)
        latent_TR, k_rope = self._row(row_TR, context)
        q_THD = torch.cat((q_nope, q_rope), -1)
        kv: Tensor = self.kv_b_proj(latent_TR, context.adapter_gate)
        k_nope, v_THD = torch.split(kv.view(len(kv), self.heads, -1), [self.nope_dim, self.v_dim], -1)
        k_THD = torch.cat((k_nope, k_rope.expand(-1, self.heads, -1)), -1)
        return q_THD * self._scale if self._scale != 1 else q_THD, k_THD, v_THD

    def _attend_latent(
        self, query_TR: Tensor, row_TR: Tensor, context: ForwardContext, layer: AttentionLayer
    ) -> Tensor:
        q_nope, q_rope = self._queries(query_TR, context)
        latent_TR, k_rope = self._row(row_TR, context)
        q_THL = torch.cat((self._into_query(q_nope, context), q_rope), -1) * self._latent_scale
        k_T1L = torch.cat((latent_TR.unsqueeze(1), k_rope), -1)
        out_THR = context.plan.attend(q_THL, k_T1L, k_T1L[..., : self.kv_rank], layer)
        return self._out_of_value(out_THR, context)

    def _queries(self, query_TR: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """The parts of every head without and with positions."""
        if self.q_rank is not None:
            query_TR = self.q_b_proj(query_TR, context.adapter_gate)
        q_THD = query_TR.view(len(query_TR), self.heads, -1)
        q_nope, q_rope = torch.split(q_THD, [self.nope_dim, self.rope_dim], -1)
        return q_nope, self._rotate(q_rope, context)

    def _row(self, row_TR: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """The two parts of what is cached of a token: compressed key and value, and rotated key (T, 1, rope size)."""
        latent_TR, rope_TR = torch.split(row_TR, [self.kv_rank, self.rope_dim], -1)
        return self.kv_a_layernorm(latent_TR), self._rotate(rope_TR.unsqueeze(1), context)

    def _rotate(self, x_THD: Tensor, context: ForwardContext) -> Tensor:
        return ops.rope(pairs_to_halves(x_THD) if self.interleaved else x_THD, *context.rotary[0])

    def _into_query(self, q_THN: Tensor, context: ForwardContext) -> Tensor:
        """Multiply the part of `kv_b_proj` that makes keys into queries: (T, H, kv rank)."""
        weight_HNR = self.kv_b_proj.weight.view(self.heads, -1, self.kv_rank)[:, : self.nope_dim]
        out_THR = torch.einsum("thn,hnr->thr", q_THN, weight_HNR.to(q_THN.dtype))
        a, b = self.kv_b_proj.lora_A, self.kv_b_proj.lora_B
        if not isinstance(context.adapter_gate, Tensor | float) or a is None or b is None:
            return out_THR
        b_AHN = b.view(len(b), self.heads, -1)[..., : self.nope_dim].to(q_THN.dtype)
        ranks = torch.einsum("thn,ahn->tha", q_THN, b_AHN) * _per_head(context.adapter_gate)
        return out_THR + ranks.to(q_THN.dtype) @ a.to(q_THN.dtype)

    def _out_of_value(self, out_THR: Tensor, context: ForwardContext) -> Tensor:
        """Multiply what was attended over by the part of `kv_b_proj` that makes values: (T, H, value size)."""
        weight_HVR = self.kv_b_proj.weight.view(self.heads, -1, self.kv_rank)[:, self.nope_dim :]
        values_THV = torch.einsum("thr,hvr->thv", out_THR, weight_HVR.to(out_THR.dtype))
        a, b = self.kv_b_proj.lora_A, self.kv_b_proj.lora_B
        if not isinstance(context.adapter_gate, Tensor | float) or a is None or b is None:
            return values_THV
        ranks = (out_THR @ a.to(out_THR.dtype).T) * _per_head(context.adapter_gate)
        b_AHV = b.view(len(b), self.heads, -1)[..., self.nope_dim :].to(out_THR.dtype)
        return values_THV + torch.einsum("tha,ahv->thv", ranks.to(out_THR.dtype), b_AHV)

    def _choose(self, x_TD: Tensor, query_TR: Tensor, context: ForwardContext) -> Tensor | None:
        """The positions to attend to, chosen here or by an earlier layer; None: all."""
        assert self.chosen_by is not None
        chosen = context.chosen_positions
        if self.indexer is not None and self.chosen_by not in chosen:
            own = context.plan.choose(self.indexer(x_TD, query_TR, context), self.chosen_by, self.indexer.count)
            given = None if context.given_positions is None else context.given_positions.get(self.chosen_by)
            if own is not None and given is not None:
                own = torch.where((given < 0).all(-1, keepdim=True), own, given)
            chosen[self.chosen_by] = own
        return chosen[self.chosen_by]


def _per_head(gate: Tensor | float) -> Tensor | float:
    return gate.unsqueeze(1) if isinstance(gate, Tensor) else gate
