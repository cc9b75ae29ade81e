"""Keys of the rollouts' sockets, made from the run's token: who knows it may ask for batches, and nobody else."""

import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from headway.base.errors import UsageError
from headway.base.processes import is_loopback


@dataclass(frozen=True)
class CurvePair:
    """A CURVE key pair, in Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def derive(cls, token: str, side: str) -> "CurvePair":
        """Make the pair of one side. Both sides know both pairs, since both know the token."""
        secret = z85.encode(hmac.digest(token.encode(), f"headway rollouts {side}".encode(), hashlib.sha256))
        return cls(zmq.curve_public(secret), secret)


@dataclass(frozen=True)
class CurveKeys:
    server: CurvePair
    client: CurvePair

    def secure_server(self, socket: "zmq.Socket[bytes]") -> None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.server.public, self.server.secret

    def secure_client(self, socket: "zmq.Socket[bytes]") -> None:
        socket.curve_serverkey = self.server.public
        socket.curve_publickey, socket.curve_secretkey = self.client.public, self.client.secret


def curve_keys(address: str, token: str | None) -> CurveKeys | None:
    """Return the keys for an address that others can reach; None for loopback, where batches go in clear.

    Raises UsageError where others can reach it and there is no token.
    """
    host = urlsplit(address).hostname or ""
    if not address.startswith("tcp:") or is_loopback(host):
        return None
    if token is None:
        raise UsageError(f"rollouts.address {address} can be reached by others: set HEADWAY_TOKEN, or use 127.0.0.1")
    return CurveKeys(CurvePair.derive(token, "server"), CurvePair.derive(token, "client"))
