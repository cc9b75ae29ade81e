"""Attention and recurrences within packed samples, for training and whole prefills."""

from collections.abc import Iterator, Sequence
from copy import copy

import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.models import ops
from headway.models.ops.attention.layer import AttentionGrads, AttentionLayer
from headway.models.ops.attention.masked import QUERIES, attend_masked, masked_attention
from headway.models.ops.attention.packed import QKV, PackedSamples
from headway.models.packed import AttentionPlan, IndexScores, Recurrence, Spans
from headway.models.sparse_attention import choose_positions, chosen_mask


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
        if self._spans is None:
            return ops.windowed_attention(q_THD, k_TKD, v_TKD, self, self, layer)
        return self._attend_spans(q_THD, k_TKD, v_TKD, self._spans, layer)

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
        if self._plain(layer):
            return ops.packed_attention_forward(q_THD, k_TKD, v_TKD, self)
        if self._windowed(layer):
            return ops.windowed_attention_forward(q_THD, k_TKD, v_TKD, self, self, layer)
        return super().attend_forward(q_THD, k_TKD, v_TKD, layer)

    def attend_backward(
        self, grad_THD: Tensor, qkv: QKV, out_THD: Tensor, kept: tuple[Tensor, ...], layer: AttentionLayer
    ) -> AttentionGrads:
        if self._plain(layer):
            return *ops.packed_attention_backward(grad_THD, qkv, out_THD, kept, self), None
        if self._windowed(layer):
            return ops.windowed_attention_backward(grad_THD, qkv, out_THD, kept, self, self, layer)
        return super().attend_backward(grad_THD, qkv, out_THD, kept, layer)

    def _attend_spans(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spans: Spans, layer: AttentionLayer) -> Tensor:
        def attend(q_BnHD: Tensor, k_BnKD: Tensor, v_BnKD: Tensor, last_Bn: Tensor) -> Tensor:
            return attend_masked(q_BnHD, k_BnKD, v_BnKD, layer, last_Bn, spans.longest).flatten(0, 1)

        tensors = q_THD, k_TKD, v_TKD, spans.last_T
        if self.short:
            rows, back = self.buckets
            return torch.cat([attend(*(x[at] for x in tensors)) for at in rows])[back]
        samples = zip(*(torch.split(x[None], self.lengths, 1) for x in tensors), strict=True)
        return torch.cat([attend(*sample) for sample in samples])

    def _windowed(self, layer: AttentionLayer) -> bool:
        return self._spans is None and layer.chosen is None

    def _plain(self, layer: AttentionLayer) -> bool:
        """Tell if `layer` wants full causal attention of these samples, none of which its window cuts."""
        return self._spans is None and layer.unmasked_plain and (layer.window is None or layer.window >= self.longest)


def _over_chosen(
    q_nHD: Tensor, k_nKD: Tensor, v_nKD: Tensor, chosen_nk: Tensor, layer: AttentionLayer
) -> Iterator[Tensor]:
    """Attention within one sample over the chosen positions, some queries at a time."""
    heads_per_kv = q_nHD.shape[1] // k_nKD.shape[1]
    for start in range(0, len(q_nHD), QUERIES):
        end = min(start + QUERIES, len(q_nHD))
        mask = chosen_mask(chosen_nk[start:end], end, q_nHD.dtype).repeat(1, 1, heads_per_kv, 1)
        k, v = (x[:end].transpose(0, 1).unsqueeze(0) for x in (k_nKD, v_nKD))
        yield masked_attention(q_nHD[None, start:end], k, v, mask, layer)[0]
