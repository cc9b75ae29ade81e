"""Attention within packed samples, for training and whole prefills."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.core.errors import HeadwayError
from headway.models.ops import flash_attention as flash
from headway.models.ops.attention import (
    long_attention,
    long_backward,
    long_forward,
    varlen_attention,
    varlen_backward,
    varlen_forward,
)
from headway.models.packed import QKV, AttentionGrads, AttentionLayer, AttentionPlan

_SHORT = 64
"""Samples of up to this many tokens on average are batched by length: a call each would cost more than padding."""
_SLACK = 8
"""Tokens of padding that a sample may get so that it shares a batch."""
_QUERIES = 1024
"""Queries at a time where attention is masked: what they don't see is then mostly left out."""
_CUDNN_FROM = 4096
"""On CUDA, samples of this many tokens are worth a kernel call each; shorter ones go through one call together."""


class PackedPlan(AttentionPlan):
    """Keys are those of the same packed tokens: samples of `lengths`, end to end, that never see each other."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = [int(n) for n in lengths if n]
        self.tokens = sum(self.lengths)
        self.longest = max(self.lengths, default=0)
        self.device = torch.device(device)

    @cached_property
    def positions(self) -> Tensor:
        """0 to n - 1 for each sample of n tokens: (T,)."""
        return torch.cat([torch.arange(n, device=self.device) for n in self.lengths])

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer) -> Tensor:
        if len(q_THD) != self.tokens:
            raise HeadwayError(f"the plan is for {self.tokens} tokens, not {len(q_THD)}")
        if not self._plain(layer):
            samples = zip(*(torch.split(x, self.lengths) for x in (q_THD, k_TKD, v_TKD)), strict=True)
            return torch.cat([part for q, k, v in samples for part in _windows(q, k, v, layer)])
        if torch.is_grad_enabled() and _has_kernels(q_THD):
            out: Tensor = _Attention.apply(self, layer, q_THD, k_TKD, v_TKD)  # type: ignore[no-untyped-call]  # torch has no types here
            return out
        if _half_on_cuda(q_THD):
            return self._attend_cuda(q_THD, k_TKD, v_TKD)
        if self.tokens == self.longest * len(self.lengths):
            shape = (len(self.lengths), self.longest)
            batch = [x.view(*shape, *x.shape[1:]) for x in (q_THD, k_TKD, v_TKD)]
            return _causal(*batch).reshape(q_THD.shape)
        if self.tokens <= _SHORT * len(self.lengths):
            rows, back = self._buckets
            parts = [_causal(q_THD[at], k_TKD[at], v_TKD[at]).flatten(0, 1) for at in rows]
            return torch.cat(parts)[back]
        samples = zip(*(torch.split(x, self.lengths) for x in (q_THD, k_TKD, v_TKD)), strict=True)
        return torch.cat([_alone(q, k, v) for q, k, v in samples])

    def attend_forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not _has_kernels(q_THD) or not self._plain(layer):
            return super().attend_forward(q_THD, k_TKD, v_TKD, layer)
        if self._flash(q_THD, k_TKD):
            return flash.flash_forward(q_THD, k_TKD, v_TKD, self._ends, self.longest)
        parts: list[Tensor] = []
        kept: list[Tensor] = []
        for (lengths, ends), q, k, v in self._split(q_THD, k_TKD, v_TKD):
            if ends is None:
                part, own = long_forward(q, k, v)
            else:
                part, own = varlen_forward(q, k, v, ends, max(lengths))
            parts.append(part)
            kept.extend(own)
        return parts[0] if len(parts) == 1 else torch.cat(parts), tuple(kept)

    def attend_backward(
        self, grad_THD: Tensor, qkv: QKV, out_THD: Tensor, kept: tuple[Tensor, ...], layer: AttentionLayer
    ) -> AttentionGrads:
        if not _has_kernels(out_THD) or not self._plain(layer):
            return super().attend_backward(grad_THD, qkv, out_THD, kept, layer)
        if self._flash(*qkv[:2]):
            return *flash.flash_backward(grad_THD, qkv, out_THD, kept, self._ends, self.longest), None
        each, grads = iter(kept), []
        for (lengths, ends), grad, q, k, v, out in self._split(grad_THD, *qkv, out_THD):
            own = (next(each), next(each), next(each))
            if ends is None:
                grads.append(long_backward(grad, (q, k, v), out, own))
            else:
                grads.append(varlen_backward(grad, (q, k, v), out, own, ends, max(lengths)))
        dq, dk, dv = grads[0] if len(grads) == 1 else (torch.cat(parts) for parts in zip(*grads, strict=True))
        return dq, dk, dv, None

    def _attend_cuda(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        parts = []
        for (lengths, ends), q, k, v in self._split(q_THD, k_TKD, v_TKD):
            if ends is None:
                parts.append(long_attention(q, k, v))
            else:
                parts.append(varlen_attention(q, k, v, ends, max(lengths)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _plain(self, layer: AttentionLayer) -> bool:
        """Whether full causal attention is what `layer` wants of these samples, none of which its window cuts."""
        return layer.plain or (layer.sinks is None and layer.scale is None and (layer.window or 0) >= self.longest)

    def _flash(self, q_THD: Tensor, k_TKD: Tensor) -> bool:
        return self.longest >= flash.FROM and flash.works(q_THD, k_TKD, packed=len(self.lengths) > 1)

    @cached_property
    def _ends(self) -> Tensor | None:
        """Where samples end, after a leading 0. None for one sample, which needs no telling."""
        if len(self.lengths) == 1:
            return None
        return _ends_of(self.lengths, self.device)

    def _split(self, *tensors: Tensor) -> Iterator[Any]:
        """Each run with its rows of every tensor."""
        sizes = [sum(lengths) for lengths, _ in self._runs]
        return zip(self._runs, *(torch.split(x, sizes) for x in tensors), strict=True)

    @cached_property
    def _runs(self) -> list[tuple[list[int], Tensor | None]]:
        """Neighbouring short samples together, with where they end (and a leading 0); long ones by themselves."""
        runs: list[tuple[list[int], Tensor | None]] = []
        for long, group in groupby(self.lengths, key=lambda n: n >= _CUDNN_FROM):
            lengths = list(group)
            if long:
                runs += [([length], None) for length in lengths]
            else:
                runs.append((lengths, _ends_of(lengths, self.device)))
        return runs

    @cached_property
    def _buckets(self) -> tuple[list[Tensor], Tensor]:
        """Samples of similar length as batches, padded at the end, where causal attention never looks.

        Returns the tokens of each batch, (samples, longest of them), and where every token is in the result.
        """
        starts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        rows, back = [], torch.empty(self.tokens, dtype=torch.long)
        offset = 0
        for members in group_by_length(self.lengths):
            longest = self.lengths[members[0]]
            for row, sample in enumerate(members):
                first = offset + row * longest
                back[starts[sample] : starts[sample + 1]] = torch.arange(first, first + self.lengths[sample])
            at = torch.tensor([starts[sample] for sample in members])[:, None] + torch.arange(longest)
            last = torch.tensor([starts[sample + 1] - 1 for sample in members])[:, None]
            rows.append(at.minimum(last).to(self.device))
            offset += at.numel()
        return rows, back.to(self.device)


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Samples, longest first, in groups whose members lack at most `_SLACK` tokens of the first."""
    groups: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        if groups and lengths[groups[-1][0]] - lengths[sample] <= _SLACK:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


class _Attention(torch.autograd.Function):
    """A plan's attention by its two passes: torch's own copies gradients on the way."""

    @staticmethod
    def forward(
        ctx: Any, plan: PackedPlan, layer: AttentionLayer, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> Tensor:
        out_THD, kept = plan.attend_forward(q_THD, k_TKD, v_TKD, layer)
        ctx.plan, ctx.layer = plan, layer
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, *kept)
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, out_THD, *kept = ctx.saved_tensors
        qkv = (q_THD, k_TKD, v_TKD)
        return None, None, *ctx.plan.attend_backward(grad_THD, qkv, out_THD, tuple(kept), ctx.layer)[:3]


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


def _ends_of(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def _has_kernels(x_THD: Tensor) -> bool:
    """Whether the two passes have kernels of their own."""
    return _half_on_cuda(x_THD) and x_THD.shape[-1] <= 128 and x_THD.shape[-1] % 8 == 0


def _half_on_cuda(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def _alone(q_nHD: Tensor, k_nKD: Tensor, v_nKD: Tensor) -> Tensor:
    return _causal(q_nHD.unsqueeze(0), k_nKD.unsqueeze(0), v_nKD.unsqueeze(0)).squeeze(0)


def _causal(q_BnHD: Tensor, k_BnKD: Tensor, v_BnKD: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BnHD, k_BnKD, v_BnKD))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
