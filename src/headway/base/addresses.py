"""Addresses of this host: those by which it reaches a peer, and those at which it cannot listen."""

import os
import socket

from headway.base.errors import HeadwayError


def own_address(peer: str) -> str:
    """Return the address of the interface by which this host reaches `peer`. Raises HeadwayError where none does."""
    try:
        family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise HeadwayError(f"cannot reach {peer} from here: {error.strerror or error}") from None


def own_interface(peer: str) -> str:
    """Return the name of that interface, such as eth0. Raises HeadwayError."""
    import psutil  # here, because few commands need it

    address = own_address(peer)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    raise HeadwayError(f"no interface of this host has the address {address}, by which it reaches {peer}")


def cannot_listen(host: str, port: int, error: OSError, remedy: str = "choose another --port") -> HeadwayError:
    """Make the error of a server whose address is taken, or not this host's."""
    # asyncio's text repeats the address; names that nobody knows have no errno of the system.
    known = error.errno is not None and error.errno > 0
    why = os.strerror(error.errno) if known and error.errno is not None else error.strerror or str(error)
    return HeadwayError(f"cannot listen at {host}:{port}: {why}; {remedy}")


def is_own(host: str) -> bool:
    """Tell if `host` is a name or an address of this host."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
