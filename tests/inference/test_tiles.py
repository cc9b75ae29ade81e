"""How decoding sequences are cut along their keys for attention's programs."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.inference.embedded.attention.tiles import KeyCutter

LENGTHS = st.lists(st.one_of(st.integers(1, 300), st.integers(1, 200_000)), min_size=1, max_size=300)


@given(LENGTHS, st.sampled_from([1, 2, 3, 4, 8, 32]), st.sampled_from([1, 256, 1536]))
def test_parts_have_every_key_once_and_fit_their_room(lengths: list[int], kv_heads: int, at_once: int) -> None:
    cutter = KeyCutter(kv_heads, at_once)
    numbers = np.arange(len(lengths))
    cut = cutter.cut(numbers, numbers, np.array(lengths) - 1).tolist()
    rows, tokens, positions, counts, firsts, sizes, parts, places = cut
    assert counts == [1] * len(rows) and len(set(sizes)) == 1
    assert firsts == [part == 0 for part in parts]
    assert len(rows) <= len(lengths) + cutter.room
    own = [(min(sizes[0], lengths[row] - part * sizes[0]), row, part) for row, part in zip(rows, parts, strict=True)]
    assert [keys for keys, _, _ in own] == sorted((keys for keys, _, _ in own), reverse=True)
    assert min(own)[0] > 0
    taken: list[int] = []
    for number, length in enumerate(lengths):
        mine = [i for i, row in enumerate(rows) if row == number]
        assert sorted(parts[i] for i in mine) == list(range(len(mine)))
        assert sum(own[i][0] for i in mine) == length
        assert {(tokens[i], positions[i]) for i in mine} == {(number, length - 1)} and len(
            {places[i] for i in mine}
        ) == 1
        if len(mine) > 1:
            taken += range(places[mine[0]], places[mine[0]] + len(mine))
    assert len(set(taken)) == len(taken) and max(taken, default=0) < 2 * cutter.room


def test_sequences_of_one_length_stay_whole_where_they_fill_a_device() -> None:
    numbers = np.arange(64)
    assert KeyCutter(8, 512).cut(numbers, numbers, np.full(64, 2047)).shape == (8, 64)
    assert KeyCutter(4, 512).cut(numbers, numbers, np.full(64, 2047)).shape == (8, 128)


def test_a_long_sequence_among_short_ones_is_cut_and_begins_first() -> None:
    numbers = np.arange(9)
    rows, *_ = KeyCutter(8, 512).cut(numbers, numbers, np.array([99] * 8 + [9999]))
    assert rows[:39].tolist() == [8] * 39 and sorted(rows.tolist()) == [*range(8), *[8] * 40]
