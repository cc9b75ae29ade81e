"""Attention with spans is that of a dense mask: causal within the window, and to all later tokens of a token's span."""

import pytest
import torch

from headway.models.attention import PackedPlan
from headway.models.ops.attention import masked
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.packed import Spans

SAMPLES = {"short": [9, 1, 30, 4], "long": [150, 40]}
"""Lengths: short samples are batched by length, with padding."""


@pytest.mark.parametrize("lengths", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("queries", "softcap"), [(7, None), (1024, 5.0)])
def test_spans_are_seen_in_both_directions(
    lengths: list[int], window: int | None, queries: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked, "QUERIES", queries)
    draw = torch.Generator().manual_seed(0)
    tokens, plan = sum(lengths), PackedPlan(lengths)
    q, k, v = (torch.randn(tokens, heads, 8, generator=draw).requires_grad_() for heads in (4, 2, 2))
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    # Spans of six tokens in every sample that is longer than ten.
    last, span = plan.positions.clone(), torch.full((tokens,), -1)
    for number, length in enumerate(lengths):
        for first in range(2, length - 8, 9):
            start = sum(lengths[:number]) + first
            last[start : start + 6], span[start : start + 6] = first + 5, start
    causal = plan.positions[None] <= plan.positions[:, None]
    within = (span[None] == span[:, None]) & (span[None] >= 0)
    seen = (causal | within) & (sample[None] == sample[:, None])
    if window is not None:
        seen &= plan.positions[None] > plan.positions[:, None] - window
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 8**0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1))
    found = plan.with_spans(Spans(last, 6)).attend(q, k, v, AttentionLayer(0, window, softcap=softcap))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    probe = torch.randn(expected.shape, generator=draw)
    theirs, ours = (torch.autograd.grad((out * probe).sum(), (q, k, v)) for out in (expected, found))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
