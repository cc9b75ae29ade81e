"""The block cache: who owns what, and what is found again."""

from hypothesis import given
from hypothesis import strategies as st

from headway.inference.embedded.scheduling.blocks import BlockCache, chain_hash, root_hash

ROOT = root_hash("salt", 0)


def fill(cache: BlockCache, tokens: list[int], root: bytes = ROOT) -> list[int]:
    """Take and register the full blocks of `tokens`, as a sequence that ran would."""
    blocks = cache.take(len(tokens) // cache.block_size)
    parent = root
    for index, block in enumerate(blocks):
        parent = chain_hash(parent, tokens[index * cache.block_size : (index + 1) * cache.block_size])
        cache.register(block, parent)
    return blocks


def test_a_prefix_is_found_block_by_block_and_never_whole() -> None:
    cache = BlockCache(16, 4)
    blocks = fill(cache, list(range(12)))
    assert cache.match(list(range(12)), ROOT)[0] == blocks[:2]
    assert cache.match(list(range(13)), ROOT)[0] == blocks
    assert cache.match([*range(8), 99, 99, 99, 99, 99], ROOT)[0] == blocks[:2]
    assert cache.match([99, *range(12)], ROOT)[0] == []


def test_other_salts_and_a_switched_off_cache_find_nothing() -> None:
    cache = BlockCache(16, 4)
    fill(cache, list(range(12)))
    assert cache.match(list(range(12)), root_hash("other", 0))[0] == []
    assert cache.match(list(range(12)), root_hash("salt", 1))[0] == []
    off = BlockCache(16, 4, prefix_cache=False)
    fill(off, list(range(12)))
    assert off.match(list(range(12)), ROOT)[0] == []


def test_equal_tokens_after_different_beginnings_are_different_blocks() -> None:
    cache = BlockCache(16, 2)
    fill(cache, [1, 2, 7, 7])
    assert len(cache.match([3, 4, 7, 7, 0], ROOT)[0]) == 0
    assert len(cache.match([1, 2, 7, 7, 0], ROOT)[0]) == 2


def test_released_blocks_stay_findable_until_needed_and_ends_go_first() -> None:
    cache = BlockCache(4, 2)
    blocks = fill(cache, [1, 2, 3, 4, 5, 6])
    cache.release(blocks)
    assert cache.free_blocks == 4
    cache.take(2)
    assert cache.match([1, 2, 3, 4, 5, 6, 7], ROOT)[0] == blocks[:2]
    cache.take(1)
    assert cache.match([1, 2, 3, 4, 5, 6, 7], ROOT)[0] == blocks[:1]


def test_after_new_weights_nothing_old_is_found_and_nobody_loses_blocks() -> None:
    cache = BlockCache(8, 2)
    mine = fill(cache, [1, 2, 3, 4])
    cache.forget_all()
    assert cache.match([1, 2, 3, 4, 5], ROOT)[0] == []
    cache.release(mine)
    assert cache.free_blocks == 8
    assert sorted(cache.take(8)) == list(range(8))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_blocks_are_never_lost_nor_given_twice(actions: list[tuple[int, int]]) -> None:
    cache = BlockCache(12, 2)
    held: list[list[int]] = []
    for kind, number in actions:
        tokens = [number, number, number % 3, 1, 5]
        if kind == 0 and cache.free_blocks >= 2:
            held.append(fill(cache, tokens[:4]))
        elif kind == 1:
            shared, _ = cache.match(tokens, ROOT)
            cache.share(shared)
            held.append(shared)
        elif kind == 2 and held:
            cache.release(held.pop(number % len(held)))
        elif kind == 3:
            cache.forget_all()
        used = {block for blocks in held for block in blocks}
        assert cache.free_blocks == 12 - len(used)
    fresh = cache.take(cache.free_blocks)
    assert not {block for blocks in held for block in blocks} & set(fresh)


def test_a_block_in_use_takes_the_hash_of_a_free_one_and_stays_longer() -> None:
    cache = BlockCache(4, 2)
    tokens = [1, 2, 3, 4]
    free = fill(cache, tokens)
    cache.release(free)
    mine = fill(cache, tokens)
    assert cache.match([*tokens, 5], ROOT)[0] == mine
    cache.release(mine)
    # What lost its hash is taken first.
    assert sorted(cache.take(2)) == sorted(free)
    assert cache.match([*tokens, 5], ROOT)[0] == mine
