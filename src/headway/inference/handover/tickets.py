"""Tickets: the address of an engine, signed by it, so that others of the run dare to fetch KV from there."""

import base64
import binascii
import hmac
import time
from hashlib import blake2b

import msgspec

from headway.inference.handover.transfers import KvTransfer

_VALID_SECONDS = 600.0


class Ticket(msgspec.Struct, frozen=True, omit_defaults=True):
    """The engine at `url` has the KV of a prompt; `transfer` says how it moves where engines move it themselves."""

    url: str
    until: float
    transfer: KvTransfer | None = None


class Tickets:
    """Issues and reads tickets of engines that share `secret`, the run's token.

    Clients carry them from one engine to the next. An engine connects only to addresses that another one has signed,
    and shows the ticket there instead of the token, which never leaves.
    """

    def __init__(self, secret: str) -> None:
        self._key = blake2b(secret.encode(), digest_size=32, person=b"headway.ticket").digest()

    def issue(self, url: str, transfer: KvTransfer | None = None) -> str:
        content = msgspec.json.encode(Ticket(url, time.time() + _VALID_SECONDS, transfer))
        body = base64.urlsafe_b64encode(content)
        return f"{body.decode()}.{self._sign(body)}"

    def read(self, ticket: str) -> Ticket | None:
        """Return what is on a ticket; None where an engine of another run signed it, nobody did, or it is old."""
        body, _, signature = ticket.partition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(body.encode()).encode()):
            return None
        try:
            read = msgspec.json.decode(base64.urlsafe_b64decode(body), type=Ticket)
        except (binascii.Error, msgspec.DecodeError):
            return None
        return read if read.until > time.time() else None

    def _sign(self, body: bytes) -> str:
        return blake2b(body, digest_size=32, key=self._key).hexdigest()
