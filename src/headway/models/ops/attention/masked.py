"""Attention of any kind in plain torch: scores, and a mask that is added to them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.ops.attention.layer import AttentionLayer

QUERIES = 1024
"""Queries at a time: what they don't see is then mostly left out."""


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


def attend_masked(
    q_BnHD: Tensor,
    k_BmKD: Tensor,
    v_BmKD: Tensor,
    layer: AttentionLayer,
    last_Bn: Tensor | None = None,
    longest_span: int = 1,
) -> Tensor:
    """Attention of the last n tokens of samples of m tokens, some queries at a time over the keys that they see:
    (B, n, H, D). `last` is the last place that each token sees, in spans of at most `longest_span` tokens; None: its
    own."""
    tokens, length, heads_per_kv = q_BnHD.shape[1], k_BmKD.shape[1], q_BnHD.shape[2] // k_BmKD.shape[2]
    before = length - tokens
    places = torch.arange(length, device=q_BnHD.device)
    parts = []
    for start in range(0, tokens, QUERIES):
        end = min(start + QUERIES, tokens)
        first = 0 if layer.window is None else max(0, before + start + 1 - layer.window)
        seen = slice(first, min(length, before + end + longest_span - 1))
        queries = places[None, before + start : before + end]
        # Padding sees itself: a row that sees nothing would have no number as its gradient.
        last = None if last_Bn is None else last_Bn[:, start:end].maximum(queries)
        mask = visible_mask(queries, places[seen], layer.window, heads_per_kv, q_BnHD.dtype, last)
        k, v = (x[:, seen].transpose(1, 2) for x in (k_BmKD, v_BmKD))
        parts.append(masked_attention(q_BnHD[:, start:end], k, v, mask, layer))
    return torch.cat(parts, 1)
