"""The one encoding of a message that is signed or hashed: MessagePack with sorted keys. Decoding never runs code."""

from hashlib import sha256
from typing import TypeVar

import msgspec

from headway.base.errors import HeadwayError

Message = TypeVar("Message")

LONGEST_MESSAGE = 64 << 20
"""Bytes of a message that are looked at."""

_encoder = msgspec.msgpack.Encoder(order="deterministic")


class InvalidMessageError(HeadwayError):
    """Bytes of a stranger that are no message of the swarm: malformed, too long, or not signed by whom they name."""


def encode(message: object) -> bytes:
    """Encode a message. Equal messages have equal bytes."""
    return _encoder.encode(message)


def decode(kind: type[Message], data: bytes, longest: int = LONGEST_MESSAGE) -> Message:
    """Decode `data`, which must be exactly as `encode` writes it. Raises InvalidMessageError."""
    if len(data) > longest:
        raise InvalidMessageError(f"a {kind.__name__} of {len(data)} bytes; at most {longest} are taken")
    try:
        message = msgspec.msgpack.decode(data, type=kind)
        same = encode(message) == data
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise InvalidMessageError(f"not a {kind.__name__}: {error}") from None
    if not same:
        # Two encodings of one message would let it count twice, under two hashes.
        raise InvalidMessageError(f"a {kind.__name__} in another encoding than the canonical one")
    return message


def digest(message: object) -> str:
    """Return the SHA-256 of a message's canonical bytes, as hex."""
    return sha256(encode(message)).hexdigest()
