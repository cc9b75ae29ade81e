"""Typed binary messages: msgpack by msgspec, numpy arrays as raw bytes. Decoding never runs code."""

from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

Message = TypeVar("Message")
Array = NDArray[Any]


class _RawArray(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def _encode_array(value: object) -> _RawArray:
    if isinstance(value, np.ndarray):
        return _RawArray(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    raise TypeError(f"cannot send a {type(value).__name__}")


def _decode_array(kind: Any, value: object) -> Array:
    raw = msgspec.convert(value, _RawArray)
    dtype = np.dtype(raw.dtype)
    if dtype.hasobject:
        raise ValueError("arrays of objects are refused")
    # The copy makes the array writable, which torch wants of memory that it shares.
    return np.frombuffer(raw.data, dtype=dtype).reshape(raw.shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(message: object) -> bytes:
    return _encoder.encode(message)


def decode(kind: type[Message], data: bytes | memoryview) -> Message:
    """Raises msgspec.ValidationError or ValueError when `data` is not a `kind`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)
