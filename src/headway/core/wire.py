"""Typed binary messages: msgpack by msgspec, numpy arrays as raw bytes. Decoding never runs code."""

from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.byte_planes import LARGEST_ELEMENT, pack, unpack

Message = TypeVar("Message")
Array = NDArray[Any]


class _RawArray(msgspec.Struct, array_like=True):
    """`packed`: the bytes are those of `core.byte_planes`, as for all integers over several axes (routed experts)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    packed: bool = False


def _encode_array(value: object) -> _RawArray:
    if isinstance(value, np.ndarray):
        if value.ndim > 1 and value.dtype.kind in "iu" and value.dtype.itemsize <= LARGEST_ELEMENT:
            return _RawArray(value.dtype.str, value.shape, pack(value), packed=True)
        return _RawArray(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    raise TypeError(f"cannot send a {type(value).__name__}")


def _decode_array(kind: Any, value: object) -> Array:
    raw = msgspec.convert(value, _RawArray)
    dtype, expected = np.dtype(raw.dtype), element_type(kind)
    if dtype.hasobject:
        raise ValueError("arrays of objects are refused")
    if expected is not None and dtype != expected:
        raise ValueError(f"expected an array of {expected}, got {dtype}")
    if raw.packed:
        return unpack(raw.data, raw.dtype, raw.shape)
    # The copy makes the array writable, which torch wants of memory that it shares.
    return np.frombuffer(raw.data, dtype=dtype).reshape(raw.shape).copy()


@cache
def element_type(kind: Any) -> "np.dtype[Any] | None":
    """Return the dtype that `NDArray[...]` names; None where it leaves that open."""
    # NDArray[T] is ndarray[shape, dtype[T]], or an alias with the one argument T in newer versions of numpy.
    for parameter in get_args(kind):
        for element in (parameter, *get_args(parameter)):
            if isinstance(element, type) and issubclass(element, np.generic):
                return np.dtype(element)
    return None


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(message: object) -> bytes:
    return _encoder.encode(message)


def decode(kind: type[Message], data: bytes | memoryview) -> Message:
    """Raises msgspec.ValidationError or ValueError when `data` is not a `kind`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)
