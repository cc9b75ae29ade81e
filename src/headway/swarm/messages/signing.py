"""Signatures of HTTP requests: every request of a swarm names its key, and cannot be sent again later by another."""

import time
from hashlib import sha256

import msgspec

from headway.swarm.messages.canonical import InvalidMessageError, encode
from headway.swarm.messages.keys import SigningKey, is_signed

SCHEME = "Headway"
WINDOW_SECONDS = 600.0
"""Clocks of strangers differ by this much at most."""
_KIND = "HttpRequest"


class HttpRequest(msgspec.Struct, frozen=True):
    """The signed part of a request. `body` is the SHA-256 of its bytes."""

    method: str
    path: str
    at: int
    body: bytes


def authorization(key: SigningKey, method: str, path: str, body: bytes = b"", now: float | None = None) -> str:
    """Return the Authorization header of a request."""
    at = int(time.time() if now is None else now)
    signature = key.sign_bytes(_KIND, _signed(method, path, at, body))
    return f"{SCHEME} {key.public.hex()} {at} {signature.hex()}"


def claimed_key(header: str | None) -> str:
    """Return the key that a header names, in hex, before anything is verified. Raises InvalidMessageError."""
    return _parse(header)[0].hex()


def verify(header: str | None, method: str, path: str, body: bytes = b"", now: float | None = None) -> bytes:
    """Return the key that signed this request. Raises InvalidMessageError."""
    key, at, signature = _parse(header)
    late = (time.time() if now is None else now) - at
    if abs(late) > WINDOW_SECONDS:
        raise InvalidMessageError(f"the request was signed {late:.0f} s ago; set the clock of your machine")
    if not is_signed(_KIND, _signed(method, path, at, body), key, signature):
        raise InvalidMessageError("the signature of the request is wrong")
    return key


def _parse(header: str | None) -> tuple[bytes, int, bytes]:
    scheme, _, rest = (header or "").partition(" ")
    words = rest.split(" ")
    try:
        key, at, signature = words
        found = bytes.fromhex(key), int(at), bytes.fromhex(signature)
    except ValueError:
        found = b"", 0, b""
    if scheme != SCHEME or len(found[0]) != 32 or len(found[2]) != 64:
        raise InvalidMessageError(f"the request is not signed: Authorization must be {SCHEME} KEY TIME SIGNATURE")
    return found


def _signed(method: str, path: str, at: int, body: bytes) -> bytes:
    return encode(HttpRequest(method, path, at, sha256(body).digest()))
