"""Typed binary messages: what goes in comes out, and nothing else gets in."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray

from headway.core.streams import Floats, Ints
from headway.core.wire import Array, decode, element_type, encode


class Message(msgspec.Struct):
    ids: Ints
    values: Floats | None = None


class AnyArray(msgspec.Struct):
    data: Array


@given(arrays(st.sampled_from(["<i4", "<f4", "|b1", "<i2", "<u8"]), array_shapes(min_dims=0, max_dims=3, min_side=0)))
def test_arrays_come_out_as_they_went_in(data: NDArray[np.generic]) -> None:
    got = decode(AnyArray, encode(AnyArray(data))).data
    assert got.dtype == data.dtype and got.shape == data.shape and got.flags.writeable
    np.testing.assert_array_equal(got, data)


def test_arrays_of_another_type_or_of_objects_are_refused() -> None:
    floats = encode({"ids": np.zeros(3, dtype=np.float32)})
    with pytest.raises((msgspec.ValidationError, ValueError), match="expected an array of int32, got float32"):
        decode(Message, floats)
    with pytest.raises((msgspec.ValidationError, ValueError)):
        decode(AnyArray, msgspec.msgpack.encode({"data": ["|O", [1], b"\0" * 8]}))
    with pytest.raises(TypeError, match="cannot send"):
        encode({"function": print})


@pytest.mark.parametrize("data", [b"", b"\x81", b"garbage", msgspec.msgpack.encode({"ids": ["<i4", [5], b"xx"]})])
def test_broken_messages_raise_and_run_nothing(data: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, ValueError)):
        decode(Message, data)


def test_element_types_are_found_in_either_form_of_ndarray() -> None:
    """Versions of numpy spell `NDArray[T]` as an array of a dtype of T, or as an alias with the one argument T."""
    spelled, alias = np.ndarray[tuple[int], np.dtype[np.int16]], list[np.int16]
    assert element_type(spelled) == element_type(alias) == element_type(NDArray[np.int16]) == np.int16
    assert element_type(Array) is None
