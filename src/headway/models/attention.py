"""Attention and recurrences within packed samples, for training and whole prefills."""

from collections.abc import Iterator, Sequence
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.models import ops
from headway.models.ops.attention.packed import QKV, PackedSamples
from headway.models.packed import AttentionGrads, AttentionLayer, AttentionPlan, IndexScores, Recurrence, Spans
from headway.models.sparse_attention import choose_positions, chosen_mask

_QUERIES = 1024
"""Queries at a time where attention is masked: what they don't see is then mostly left out."""


class PackedPlan(PackedSamples, AttentionPlan):
    """Keys are those of the same packed tokens."""

    _spans: Spans | None = None

    def with_spans(self, spans: Spans) -> "PackedPlan":
        plan = copy(self)
        plan._spans = spans
        return plan

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer) -> Tensor:
        if len(q_THD) != self.tokens:
            raise HeadwayError(f"the plan is for {self.tokens} tokens, not {len(q_THD)}")
        if self._plain(layer):
            return ops.packed_attention(q_THD, k_TKD, v_TKD, self)
        if layer.chosen is not None:
            each = zip(*(torch.split(x, self.lengths) for x in (q_THD, k_TKD, v_TKD, layer.chosen)), strict=True)
            return torch.cat([part for q, k, v, at in each for part in _over_chosen(q, k, v, at, layer)])
        if self.short:
            rows, back = self.buckets
            parts = [_windowed(q_THD[at], k_TKD[at], v_TKD[at], layer, self._spans_at(at)) for at in rows]
            return torch.cat([part.flatten(0, 1) for part in parts])[back]
        spans = [None] * len(self.lengths) if self._spans is None else self._spans.split(self.lengths)
        samples = zip(*(torch.split(x[None], self.lengths, 1) for x in (q_THD, k_TKD, v_TKD)), spans, strict=True)
        return torch.cat([_windowed(q, k, v, layer, own)[0] for q, k, v, own in samples])

    def choose(self, scores: IndexScores, layer: int, count: int) -> Tensor | None:
        if self.longest <= count:
            return None
        samples = zip(*(torch.split(x, self.lengths) for x in (*scores, self.positions)), strict=True)
        parts = [
            choose_positions(IndexScores(q[None], k[None], weights[None]), k[None], positions[None], count)[0]
            for q, k, weights, positions in samples
        ]
        return torch.cat(parts)

    def recur(self, layer: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """Every sample starts anew, and its state is dropped at its end."""
        return recurrence(inputs, self.lengths, None)[0]

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

    def _spans_at(self, tokens_Bn: Tensor) -> Spans | None:
        """The spans of these tokens, (B, n)."""
        return None if self._spans is None else Spans(self._spans.last_T[tokens_Bn], self._spans.longest)

    def _plain(self, layer: AttentionLayer) -> bool:
        """Tell if `layer` wants full causal attention of these samples, none of which its window cuts."""
        return self._spans is None and layer.unmasked_plain and (layer.window is None or layer.window >= self.longest)


def masked_attention(
    q_BQHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask_B1RS: Tensor, layer: AttentionLayer
) -> Tensor:
    """Attention with a mask that is added to scores, and the layer's sinks, scale and soft cap, in plain torch:
    (B, Q, H, D) for values of size D.

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
        mask_B1RS = torch.cat([mask_B1RS.expand(batch, kv_heads, -1, -1), sinks], -1)
    q_BKRD = q.reshape(batch, kv_heads, -1, dim)
    if layer.softcap is None:
        out = F.scaled_dot_product_attention(q_BKRD, k_BKSD, v_BKSD, attn_mask=mask_B1RS, scale=layer.scale)
    else:
        scores = q_BKRD @ k_BKSD.transpose(-1, -2) * (dim**-0.5 if layer.scale is None else layer.scale)
        scores = layer.softcap * torch.tanh(scores / layer.softcap) + mask_B1RS
        out = scores.softmax(-1, dtype=torch.float32).to(v_BKSD.dtype) @ v_BKSD
    return out.view(*grouped, -1).permute(0, 3, 1, 2, 4).reshape(batch, queries, heads, -1)


def visible_mask(
    queries_BQ: Tensor,
    keys_S: Tensor,
    window: int | None,
    heads_per_kv: int,
    dtype: torch.dtype,
    last_BQ: Tensor | None = None,
) -> Tensor:
    """(B, 1, R, S) for `masked_attention`: 0 where the query's position sees the key's, minus infinity elsewhere.

    `last` is the last position that each query sees; None: its own.
    """
    hidden_BQS = keys_S > (queries_BQ if last_BQ is None else last_BQ)[:, :, None]
    if window is not None:
        hidden_BQS |= keys_S <= queries_BQ[:, :, None] - window
    mask = torch.zeros(hidden_BQS.shape, dtype=dtype, device=hidden_BQS.device).masked_fill_(hidden_BQS, -torch.inf)
    mask = mask.unsqueeze(1).expand(-1, heads_per_kv, -1, -1)
    batch, queries, _ = hidden_BQS.shape
    return mask.reshape(batch, 1, heads_per_kv * queries, -1) if queries > 1 else mask.transpose(1, 2)


def _windowed(q_BnHD: Tensor, k_BnKD: Tensor, v_BnKD: Tensor, layer: AttentionLayer, spans: Spans | None) -> Tensor:
    """Attention within samples of one length, some queries at a time over the keys that they see: (B, n, H, D)."""
    length, heads_per_kv = q_BnHD.shape[1], q_BnHD.shape[2] // k_BnKD.shape[2]
    places = torch.arange(length, device=q_BnHD.device)
    longest, parts = (1 if spans is None else spans.longest), []
    for start in range(0, length, _QUERIES):
        end = min(start + _QUERIES, length)
        first = 0 if layer.window is None else max(0, start + 1 - layer.window)
        seen = slice(first, min(length, end + longest - 1))
        # Padding sees itself: a row that sees nothing would have no number as its gradient.
        last = None if spans is None else spans.last_T[:, start:end].maximum(places[start:end])
        mask = visible_mask(places[None, start:end], places[seen], layer.window, heads_per_kv, q_BnHD.dtype, last)
        k, v = (x[:, seen].transpose(1, 2) for x in (k_BnKD, v_BnKD))
        parts.append(masked_attention(q_BnHD[:, start:end], k, v, mask, layer))
    return torch.cat(parts, 1)


def _over_chosen(
    q_nHD: Tensor, k_nKD: Tensor, v_nKD: Tensor, chosen_nk: Tensor, layer: AttentionLayer
) -> Iterator[Tensor]:
    """Attention within one sample over the chosen positions, some queries at a time."""
    heads_per_kv = q_nHD.shape[1] // k_nKD.shape[1]
    for start in range(0, len(q_nHD), _QUERIES):
        end = min(start + _QUERIES, len(q_nHD))
        mask = chosen_mask(chosen_nk[start:end], end, q_nHD.dtype).repeat(1, 1, heads_per_kv, 1)
        k, v = (x[:end].transpose(0, 1).unsqueeze(0) for x in (k_nKD, v_nKD))
        yield masked_attention(q_nHD[None, start:end], k, v, mask, layer)[0]
