"""Identities of the swarm: Ed25519 keys, and messages signed with them."""

import os
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import msgspec

from headway.base.errors import UsageError
from headway.base.extras import install_command
from headway.swarm.messages.canonical import LONGEST_MESSAGE, InvalidMessageError, decode, encode

Message = TypeVar("Message")

_DOMAIN = b"headway swarm 1\0"


class Signed(msgspec.Struct, frozen=True, array_like=True):
    """A message's canonical bytes, the public key of its author, and the signature over both its kind and bytes."""

    body: bytes
    key: bytes
    signature: bytes


class SigningKey:
    """A private key. `public` are the 32 bytes by which others know its owner."""

    def __init__(self, seed: bytes) -> None:
        """Make the key of a seed of 32 bytes, which is the secret."""
        self._private = _ed25519().Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> "SigningKey":
        return cls(os.urandom(32))

    @classmethod
    def open(cls, path: Path) -> "SigningKey":
        """Read the key in a file; where there is none, make one that only this user can read."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return cls._read(path)
        with os.fdopen(handle, "w") as file:
            file.write(os.urandom(32).hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        return cls._read(path)

    @classmethod
    def _read(cls, path: Path) -> "SigningKey":
        try:
            return cls(bytes.fromhex(path.read_text().strip()))
        except ValueError:
            raise UsageError(f"{path} is not a key of a swarm: it must hold 64 hexadecimal digits") from None

    def sign_bytes(self, kind: str, body: bytes) -> bytes:
        return bytes(self._private.sign(_signed_bytes(kind, body)))

    def sign(self, message: object) -> Signed:
        body = encode(message)
        return Signed(body, self.public, self.sign_bytes(type(message).__name__, body))


def is_signed(kind: str, body: bytes, key: bytes, signature: bytes) -> bool:
    """Tell if `signature` is that of `key` on these bytes as a message of this kind."""
    from cryptography.exceptions import InvalidSignature

    try:
        _ed25519().Ed25519PublicKey.from_public_bytes(key).verify(signature, _signed_bytes(kind, body))
    except (InvalidSignature, ValueError):
        return False
    return True


def open_signed(
    kind: type[Message], signed: Signed, key: bytes | None = None, longest: int = LONGEST_MESSAGE
) -> Message:
    """Return the message that `signed` holds; with a `key`, only if that key signed it. Raises InvalidMessageError."""
    if key is not None and signed.key != key:
        raise InvalidMessageError(f"the {kind.__name__} is signed by another key")
    if len(signed.body) > longest:
        raise InvalidMessageError(f"a {kind.__name__} of {len(signed.body)} bytes; at most {longest} are taken")
    if not is_signed(kind.__name__, signed.body, signed.key, signed.signature):
        raise InvalidMessageError(f"the signature of the {kind.__name__} is wrong")
    return decode(kind, signed.body, longest)


def _signed_bytes(kind: str, body: bytes) -> bytes:
    """Prepend the kind, so that nothing that was signed as one message can be shown as another."""
    return _DOMAIN + kind.encode() + b"\0" + body


def _ed25519() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError:
        raise UsageError(f"keys of a swarm need a package: {install_command('swarm')}") from None
    return ed25519
