"""Packing loses and duplicates nothing, fills its bins and gives every rank the same work."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.packing import Cost, Plan, make_batch, plan_packing
from headway.core.samples import Sample


def lognormal(seed: int, tokens: int, seq_len: int, mean: float = 512.0, sigma: float = 1.0) -> list[int]:
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        draw = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, 256)
        lengths += [int(n) for n in np.clip(draw, 1, seq_len)]
    return lengths


def loads(plan: Plan, lengths: list[int], cost: Cost) -> list[float]:
    sizes = np.asarray(lengths)
    return [float(cost.of(sizes[[i for bin_ in rank for i in bin_]]).sum()) for rank in plan]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 64), max_size=60), st.integers(1, 9))
def test_nothing_is_lost_duplicated_or_over_long(lengths: list[int], ranks: int) -> None:
    plan = plan_packing(lengths, 64, ranks, Cost.of_width(128))
    assert sorted(i for rank in plan for bin_ in rank for i in bin_) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin_) <= 64 for rank in plan for bin_ in rank)
    assert len(plan) == ranks and len({len(rank) for rank in plan}) == 1
    if len(lengths) >= len(plan) * len(plan[0]):
        assert all(bin_ for rank in plan for bin_ in rank)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("ranks", "seq_len"), [(2, 4096), (8, 8192), (16, 8192)])
def test_bins_are_full_and_ranks_are_even_on_lognormal_lengths(seed: int, ranks: int, seq_len: int) -> None:
    lengths = lognormal(seed, 1_000_000, seq_len)
    cost = Cost.of_width(1024)
    plan = plan_packing(lengths, seq_len, ranks, cost)
    fill = sum(lengths) / (seq_len * sum(len(rank) for rank in plan))
    work = loads(plan, lengths, cost)
    # Rounding up to a multiple of the ranks may cost up to ranks - 1 bins, which is no fault of the packing.
    least_bins = math.ceil(sum(lengths) / seq_len / ranks) * ranks
    assert fill >= min(0.95, sum(lengths) / (seq_len * least_bins))
    assert max(work) / (sum(work) / ranks) - 1 <= 0.03


def test_impossible_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 8 tokens"):
        plan_packing([3, 9], 8, 1, Cost())
    with pytest.raises(ValueError, match="1 to 8 tokens"):
        plan_packing([0], 8, 1, Cost())


def make_sample(n: int, base: int, experts: bool = False) -> Sample:
    ramp = np.arange(base, base + n, dtype=np.float32)
    return Sample(
        token_ids=np.arange(base, base + n, dtype=np.int32),
        sampled=np.arange(n) > 0,
        logprobs=-ramp,
        versions=np.full(n, base, dtype=np.int32),
        advantages=ramp + 1,
        rl_weight=(np.arange(n) > 0).astype(np.float32),
        ce_weight=np.zeros(n, dtype=np.float32),
        ref_kl_weight=np.ones(n, dtype=np.float32),
        ref_logprobs=ramp + 3,
        temperature=0.5 + base,
        routed_experts=np.full((n, 2, 1), base, dtype=np.int16) if experts else None,
    )


def test_streams_stay_aligned_with_their_tokens() -> None:
    samples = [make_sample(n, 100 * k, experts=k == 1) for k, n in enumerate([5, 3, 7, 2])]
    batch = make_batch(4, samples, seq_len=10, ranks=2, cost=Cost())
    assert batch.step == 4 and batch.counts.rl == 13 and batch.counts.ce == 0 and batch.counts.ref_kl == 17
    seen = set()
    for micro in (m for rank in batch.ranks for m in rank):
        start = 0
        for n in micro.lengths:
            part = slice(start, start + n)
            k = int(micro.token_ids[start]) // 100
            seen.add(k)
            np.testing.assert_array_equal(micro.positions[part], np.arange(n))
            for name in ("token_ids", "sampled", "logprobs", "versions", "advantages", "rl_weight", "ref_logprobs"):
                np.testing.assert_array_equal(getattr(micro, name)[part], getattr(samples[k], name), err_msg=name)
            assert set(micro.temperatures[part]) == {np.float32(0.5 + 100 * k)}
            if micro.routed_experts is not None:
                assert set(micro.routed_experts[part].ravel()) == {100 if k == 1 else -1}
            start += n
        assert start == len(micro.token_ids)
    assert seen == {0, 1, 2, 3}


def test_a_rank_without_work_gets_a_token_without_weight() -> None:
    batch = make_batch(1, [make_sample(4, 0)], seq_len=8, ranks=3, cost=Cost())
    fillers = [rank[0] for rank in batch.ranks if rank[0].lengths == [1]]
    assert len(fillers) == 2
    assert all(not f.rl_weight.any() and not f.ref_kl_weight.any() and not f.sampled.any() for f in fillers)
