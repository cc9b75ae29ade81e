"""Attention within packed samples, for training and whole prefills."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.core.errors import HeadwayError
from headway.models import ops
from headway.models.ops.attention import QKV, PackedSamples
from headway.models.packed import AttentionGrads, AttentionLayer, AttentionPlan

_QUERIES = 1024
"""Queries at a time where attention is masked: what they don't see is then mostly left out."""


class PackedPlan(PackedSamples, AttentionPlan):
    """Keys are those of the same packed tokens."""

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer) -> Tensor:
        if len(q_THD) != self.tokens:
            raise HeadwayError(f"the plan is for {self.tokens} tokens, not {len(q_THD)}")
        if self._plain(layer):
            return ops.packed_attention(q_THD, k_TKD, v_TKD, self)
        samples = zip(*(torch.split(x, self.lengths) for x in (q_THD, k_TKD, v_TKD)), strict=True)
        return torch.cat([part for q, k, v in samples for part in _windows(q, k, v, layer)])

    def attend_forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not self._plain(layer):
            return super().attend_forward(q_THD, k_TKD, v_TKD, layer)
        return ops.packed_attention_forward(q_THD, k_TKD, v_TKD, self)

    def attend_backward(
        self, grad_THD: Tensor, qkv: QKV, out_THD: Tensor, kept: tuple[Tensor, ...], layer: AttentionLayer
    ) -> AttentionGrads:
        if not self._plain(layer):
            return super().attend_backward(grad_THD, qkv, out_THD, kept, layer)
        return *ops.packed_attention_backward(grad_THD, qkv, out_THD, kept, self), None

    def _plain(self, layer: AttentionLayer) -> bool:
        """Tell if `layer` wants full causal attention of these samples, none of which its window cuts."""
        return layer.plain or (layer.sinks is None and layer.scale is None and (layer.window or 0) >= self.longest)


def masked_attention(
    q_BQHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask_B1RS: Tensor, layer: AttentionLayer
) -> Tensor:
    """Attention with a mask that is added to scores, and the layer's sinks and scale, in plain torch: (B, Q, H, D).

    Query heads that share a key head are rows of one matrix, so that keys need no repeating: R = H / K heads of Q
    queries. A sink is the score of one more key, whose value is zero.
    """
    batch, queries, heads, dim = q_BQHD.shape
    kv_heads = k_BKSD.shape[1]
    grouped = (batch, kv_heads, heads // kv_heads, queries)
    q = q_BQHD.reshape(batch, queries, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
    if layer.sinks is not None:
        k_BKSD, v_BKSD = (F.pad(x, (0, 0, 0, 1)) for x in (k_BKSD, v_BKSD))
        sinks = layer.sinks.to(q.dtype).view(1, kv_heads, -1, 1).expand(grouped).reshape(batch, kv_heads, -1, 1)
        mask_B1RS = torch.cat([mask_B1RS.expand(-1, kv_heads, -1, -1), sinks], -1)
    out = F.scaled_dot_product_attention(
        q.reshape(batch, kv_heads, -1, dim), k_BKSD, v_BKSD, attn_mask=mask_B1RS, scale=layer.scale
    )
    return out.view(*grouped, dim).permute(0, 3, 1, 2, 4).reshape(q_BQHD.shape)


def visible_mask(
    queries_BQ: Tensor, keys_S: Tensor, window: int | None, heads_per_kv: int, dtype: torch.dtype
) -> Tensor:
    """(B, 1, R, S) for `masked_attention`: 0 where the query's position sees the key's, minus infinity elsewhere."""
    hidden_BQS = keys_S > queries_BQ[:, :, None]
    if window is not None:
        hidden_BQS |= keys_S <= queries_BQ[:, :, None] - window
    mask = torch.zeros(hidden_BQS.shape, dtype=dtype, device=hidden_BQS.device).masked_fill_(hidden_BQS, -torch.inf)
    mask = mask.unsqueeze(1).expand(-1, heads_per_kv, -1, -1)
    batch, queries = queries_BQ.shape
    return mask.reshape(batch, 1, heads_per_kv * queries, -1) if queries > 1 else mask.transpose(1, 2)


def _windows(q_nHD: Tensor, k_nKD: Tensor, v_nKD: Tensor, layer: AttentionLayer) -> Iterator[Tensor]:
    """Attention within one sample, some queries at a time over the keys that they see."""
    length, heads_per_kv = len(q_nHD), q_nHD.shape[1] // k_nKD.shape[1]
    places = torch.arange(length, device=q_nHD.device)
    for start in range(0, length, _QUERIES):
        end = min(start + _QUERIES, length)
        first = 0 if layer.window is None else max(0, start + 1 - layer.window)
        mask = visible_mask(places[None, start:end], places[first:end], layer.window, heads_per_kv, q_nHD.dtype)
        k, v = (x[first:end].transpose(0, 1).unsqueeze(0) for x in (k_nKD, v_nKD))
        yield masked_attention(q_nHD[None, start:end], k, v, mask, layer)[0]
