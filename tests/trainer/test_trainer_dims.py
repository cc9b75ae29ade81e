"""The groups of ranks that follow from the sizes of the parallel dimensions: arithmetic alone."""

from collections.abc import Callable, Iterable
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_helpers import small_settings

from headway.base.errors import UsageError
from headway.trainer.parallel.dims import ParallelDims
from headway.trainer.parallel.ranks import joined

sizes = st.integers(1, 5)


@st.composite
def some_dims(draw: st.DrawFn) -> ParallelDims:
    replicate, shard, context = draw(sizes), draw(sizes), draw(sizes)
    divisors = [size for size in range(1, shard * context + 1) if shard * context % size == 0]
    return ParallelDims(replicate, shard, context, draw(st.sampled_from(divisors)))


def assert_partition(groups: Iterable[Iterable[int]], world_size: int) -> None:
    """Every rank is in one group, and all of a group see the same one."""
    distinct = {tuple(group) for group in groups}
    assert sorted(rank for group in distinct for rank in group) == list(range(world_size))


def test_what_each_rank_is() -> None:
    dims = ParallelDims(replicate=2, shard=3, context=2, expert=3)
    assert (dims.world_size, dims.data_size, dims.copy_size) == (12, 6, 6)
    assert [dims.data_rank(rank) for rank in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [dims.context_rank(rank) for rank in range(12)] == [0, 1] * 6
    assert list(dims.context_ranks(7)) == [6, 7]
    assert list(dims.copy_ranks(7)) == [6, 7, 8, 9, 10, 11]
    assert list(dims.replica_ranks(7)) == [1, 7]
    assert list(dims.expert_ranks(7)) == [6, 7, 8]
    assert list(dims.loss_ranks()) == list(range(12))


@given(some_dims())
def test_groups_partition_the_world(dims: ParallelDims) -> None:
    world = range(dims.world_size)
    grouped: list[Callable[[int], range]] = [
        dims.context_ranks,
        dims.copy_ranks,
        dims.replica_ranks,
        dims.expert_ranks,
    ]
    for ranks_of in grouped:
        assert all(rank in ranks_of(rank) for rank in world)
        assert_partition((ranks_of(rank) for rank in world), dims.world_size)


@given(some_dims())
def test_ranks_of_one_data_rank_partition_the_world_and_share_sequences(dims: ParallelDims) -> None:
    world = range(dims.world_size)
    parts = [list(ranks) for _, ranks in groupby(world, key=dims.data_rank)]
    assert [dims.data_rank(part[0]) for part in parts] == list(range(dims.data_size))
    assert parts == [list(dims.context_ranks(part[0])) for part in parts]
    for part in parts:
        assert [dims.context_rank(rank) for rank in part] == list(range(dims.context))


@given(some_dims())
def test_copies_and_their_replicas_meet_in_one_rank(dims: ParallelDims) -> None:
    for rank in range(dims.world_size):
        assert set(dims.copy_ranks(rank)) & set(dims.replica_ranks(rank)) == {rank}
        assert set(dims.expert_ranks(rank)) <= set(dims.copy_ranks(rank))
        assert set(dims.context_ranks(rank)) <= set(dims.copy_ranks(rank))


def test_settings_name_the_dimensions() -> None:
    settings = small_settings(placement__trainer_ranks=6, trainer__parallel__replicate=2)
    dims = ParallelDims.from_settings(settings)
    assert dims == ParallelDims(replicate=2, shard=3)
    assert dims.data_size == settings.data_ranks == settings.placement.batch_parts == 6
    assert dims.copy_size == settings.shard_ranks == 3


def test_fewer_ranks_shard_the_weights_among_them_where_the_layout_allows() -> None:
    settings = small_settings(placement__trainer_ranks=8, trainer__parallel__replicate=2)
    assert ParallelDims.of_group(settings, 8) == ParallelDims(replicate=2, shard=4)
    assert ParallelDims.of_group(settings, 4) == ParallelDims(replicate=2, shard=2)
    assert ParallelDims.of_group(settings, 2) == ParallelDims(replicate=2, shard=1)
    for left in (1, 3, 6, 16):
        with pytest.raises(UsageError, match=rf"trainer_ranks is 8, but .* a group of {left};"):
            ParallelDims.of_group(settings, left)


def test_dimensions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="2 expert ranks do not divide the 3 ranks"):
        ParallelDims(shard=3, expert=2)
    with pytest.raises(UsageError, match="the shard dimension must have at least 1 rank"):
        ParallelDims(shard=0)
    with (
        pytest.raises(UsageError, match=r"placement\.trainer_ranks is 2, but .* a group of 1; start it with"),
        joined(small_settings(placement__trainer_ranks=2)),
    ):
        pass
