"""Arrays of small integers as planes of bytes."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headway.core.byte_planes import pack, unpack
from headway.core.protocol import RoutedExperts
from headway.core.wire import decode, encode

KINDS = st.sampled_from(["uint8", "int8", "int16", "uint16", "int32"])
ARRAYS = KINDS.flatmap(lambda kind: arrays.arrays(kind, arrays.array_shapes(min_dims=1, max_dims=3, min_side=0)))


@given(ARRAYS)
def test_packing_loses_nothing(array: np.ndarray) -> None:
    found = unpack(pack(array), array.dtype.name, array.shape)
    assert found.dtype == array.dtype and np.array_equal(found, array)
    assert found.flags.writeable


def test_expert_choices_cost_the_bytes_they_need() -> None:
    rng = np.random.default_rng(0)
    choices = rng.integers(0, 128, (500, 8, 8)).astype(np.int16)
    choices[:, 0] = -1
    assert len(pack(choices)) < 0.53 * choices.nbytes
    few = rng.integers(0, 4, (500, 8, 2)).astype(np.uint8)
    assert len(pack(few)) < 0.4 * few.nbytes


@given(st.binary(max_size=60), KINDS, st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_bytes_of_strangers_are_refused_or_have_the_shape(data: bytes, dtype: str, shape: tuple[int, int]) -> None:
    with suppress(ValueError):
        assert unpack(data, dtype, shape).shape == shape


def test_a_claim_of_less_than_there_is_inflates_no_further() -> None:
    bomb = pack(np.zeros((1000, 1000), np.uint8))
    with pytest.raises(ValueError, match="does not hold 4 bytes"):
        unpack(bomb, "uint8", (2, 2))
    with pytest.raises(ValueError, match="no packed array"):
        unpack(bomb, "float32", (2, 2))


@pytest.mark.parametrize("packed", [True, False])
def test_routed_experts_come_back_as_they_were(packed: bool) -> None:
    choices = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    record = RoutedExperts.of(choices, 5, packed=packed)
    assert (record.shape, record.start, record.end, record.dtype) == ((4, 3, 2), 5, 9, "uint8")
    assert np.array_equal(decode(RoutedExperts, encode(record)).array(), choices)
