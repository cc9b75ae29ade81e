"""The plan of packed samples: every path equals attention written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.core.errors import HeadwayError
from headway.models.attention import PackedPlan, attention, group_by_length


def written_out(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """One score per pair of tokens; those of other samples and of the future do not count."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(q))
    allowed = (sample[:, None] == sample[None]) & (place[:, None] >= place[None])
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def check(lengths: list[int], kv_heads: int, group: int, head_dim: int) -> None:
    draw = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths)
    q, k, v = (
        torch.randn(tokens, heads, head_dim, generator=draw).requires_grad_()
        for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    probe = torch.randn(q.shape, generator=draw)
    ours, expected = attention(q, k, v, PackedPlan(lengths), 0), written_out(q, k, v, lengths)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(
        torch.autograd.grad((ours * probe).sum(), (q, k, v)),
        torch.autograd.grad((expected * probe).sum(), (q, k, v)),
        strict=True,
    ):
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


def test_samples_of_no_tokens_are_skipped() -> None:
    q = torch.randn(5, 2, 4)
    assert torch.equal(PackedPlan([0, 3, 0, 2]).attend(q, q, q, 0), PackedPlan([3, 2]).attend(q, q, q, 0))


def test_a_plan_for_other_tokens_is_refused() -> None:
    q = torch.randn(5, 2, 4)
    with pytest.raises(HeadwayError, match="the plan is for 6 tokens, not 5"):
        PackedPlan([3, 3]).attend(q, q, q, 0)


@given(st.lists(st.integers(1, 64), max_size=40))
def test_groups_hold_every_sample_once_and_pad_little(lengths: list[int]) -> None:
    groups = group_by_length(lengths)
    assert sorted(sample for group in groups for sample in group) == list(range(len(lengths)))
    for group in groups:
        assert 0 <= lengths[group[0]] - min(lengths[sample] for sample in group) <= 8
