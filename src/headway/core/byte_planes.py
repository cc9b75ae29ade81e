"""Arrays of small integers as bytes: one plane for each byte of an element, deflated where that pays.

Expert choices of 128 experts in int16 have a plane of nearly random bytes, which is sent as it is, and one of zeros,
which costs next to nothing. Looking at the start of a plane tells which of them is which.
"""

import struct
import zlib
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HEADER = struct.Struct("<BQ")
_RAW, _DEFLATED = 0, 1
_LOOK = 1 << 16
_WORTH = 0.7
"""Deflate a plane that shrinks to less than this: it runs at some 65 MB/s, copying at a hundred times that."""
LARGEST_ELEMENT = 4


def pack(array: NDArray[np.integer]) -> bytes:
    """Turn integers of 1, 2 or 4 bytes into bytes; `unpack` needs their dtype and shape beside these."""
    size = array.dtype.itemsize
    flat = np.ascontiguousarray(array).view(np.uint8).reshape(-1, size)
    parts = []
    for plane in range(size):
        raw = flat[:, plane].tobytes()
        kind, data = _RAW, raw
        if len(_deflate(raw[:_LOOK])) < _WORTH * min(len(raw), _LOOK):
            kind, data = _DEFLATED, _deflate(raw)
        parts += [_HEADER.pack(kind, len(data)), data]
    return b"".join(parts)


def unpack(data: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Turn bytes of `pack` into the array. Raises ValueError where they are not those of such an array."""
    kind = np.dtype(dtype)
    if kind.kind not in "iu" or kind.itemsize > LARGEST_ELEMENT or min(shape, default=0) < 0:
        raise ValueError(f"no packed array has dtype {dtype} and shape {shape}")
    count, offset = prod(shape), 0
    planes = []
    for _ in range(kind.itemsize):
        if len(data) < offset + _HEADER.size:
            raise ValueError("packed array: it ends early")
        how, length = _HEADER.unpack_from(data, offset)
        start = offset + _HEADER.size
        offset = start + length
        planes.append(_plane(how, data[start:offset], count))
    if offset != len(data):
        raise ValueError("packed array: bytes are left over")
    return np.stack(planes, axis=-1).view(kind).reshape(shape)


def _plane(how: int, data: bytes, count: int) -> NDArray[np.uint8]:
    if how == _DEFLATED:
        data = _inflate(data, count)
    if how not in (_RAW, _DEFLATED) or len(data) != count:
        raise ValueError(f"packed array: a plane does not hold {count} bytes")
    return np.frombuffer(data, dtype=np.uint8)


def _deflate(data: bytes) -> bytes:
    # Runs and Huffman codes only: looking for longer matches takes longer than it is worth.
    deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    return deflater.compress(data) + deflater.flush()


def _inflate(data: bytes, count: int) -> bytes:
    """Never more than a byte beyond `count`, however much the data claims to hold."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, count + 1)
    except zlib.error as error:
        raise ValueError(f"packed array: {error}") from None
