"""The plan of packed samples: every path equals attention written out."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.models.attention import PackedPlan
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.packed import group_by_length

LAYER = AttentionLayer(0)


def written_out(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], layer: AttentionLayer) -> Tensor:
    """One score per pair of tokens; those of other samples, of the future and outside the window do not count."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(q))
    allowed = (sample[:, None] == sample[None]) & (place[:, None] >= place[None])
    if layer.window is not None:
        allowed &= place[:, None] - place[None] < layer.window
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (layer.scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if layer.sinks is not None:
        scores = torch.cat([scores, layer.sinks[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(q)]
    return torch.einsum("hqk,khd->qhd", weights, v)


def check(
    lengths: list[int], kv_heads: int, group: int, head_dim: int, layer: AttentionLayer = LAYER, sinks: bool = False
) -> None:
    draw = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths)
    q, k, v = (
        torch.randn(tokens, heads, head_dim, generator=draw).requires_grad_()
        for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    probe = torch.randn(q.shape, generator=draw)
    inputs = [q, k, v]
    if sinks:
        inputs.append(torch.randn(q.shape[1], generator=draw).requires_grad_())
        layer = replace(layer, sinks=inputs[3])
    plan = PackedPlan(lengths)
    ours, expected = plan.attend(q, k, v, layer), written_out(q, k, v, lengths, layer)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    wanted = torch.autograd.grad((expected * probe).sum(), inputs)
    out, kept = plan.attend_forward(q, k, v, layer)
    assert not out.requires_grad
    torch.testing.assert_close(out, ours, atol=1e-5, rtol=1e-5)
    again = plan.attend_backward(probe, (q, k, v), out, kept, layer)
    assert (again[3] is not None) == sinks
    for found in (torch.autograd.grad((ours * probe).sum(), inputs), again[: len(inputs)]):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([2, 6, 16]),
)
def test_packed_attention_is_what_it_says(lengths: list[int], kv_heads: int, group: int, head_dim: int) -> None:
    check(lengths, kv_heads, group, head_dim)


@pytest.mark.parametrize("lengths", [[130], [70, 70, 70], [200, 3, 90], [1, 1, 1], [5, 60, 12, 61, 8]])
def test_every_path_one_equal_long_and_short(lengths: list[int]) -> None:
    check(lengths, 2, 2, 16)


@pytest.mark.parametrize("lengths", [[5, 60, 12, 61, 8], [1, 2, 3], [2100, 40]])
@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("sinks", [True, False])
def test_windows_sinks_and_scales(lengths: list[int], window: int | None, sinks: bool) -> None:
    check(lengths, 2, 2, 16, AttentionLayer(3, window, scale=0.3 if sinks else None), sinks)


def test_samples_of_no_tokens_are_skipped() -> None:
    q = torch.randn(5, 2, 4)
    assert torch.equal(PackedPlan([0, 3, 0, 2]).attend(q, q, q, LAYER), PackedPlan([3, 2]).attend(q, q, q, LAYER))


def test_a_plan_for_other_tokens_is_refused() -> None:
    q = torch.randn(5, 2, 4)
    with pytest.raises(HeadwayError, match="the plan is for 6 tokens, not 5"):
        PackedPlan([3, 3]).attend(q, q, q, LAYER)


@given(st.lists(st.integers(1, 64), max_size=40))
def test_groups_hold_every_sample_once_and_pad_little(lengths: list[int]) -> None:
    groups = group_by_length(lengths)
    assert sorted(sample for group in groups for sample in group) == list(range(len(lengths)))
    for group in groups:
        assert 0 <= lengths[group[0]] - min(lengths[sample] for sample in group) <= 8
