"""Ports for processes that are started later."""

import socket

from headway.core.errors import UsageError


def free_port(host: str) -> int:
    with socket.create_server((host, 0), family=_family(host)) as probe:
        return int(probe.getsockname()[1])


def neighbouring_ports(host: str, first: int, count: int) -> list[int]:
    """`count` ports from `first` on; any free ones where `first` is 0. Raises UsageError where one can't be had."""
    if first == 0:
        return [free_port(host) for _ in range(count)]
    for port in range(first, first + count):
        try:
            socket.create_server((host, port), family=_family(host)).close()
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"cannot listen at {host}:{port}: {getattr(error, 'strerror', None) or error}; "
                f"choose another --port, with {count} free ones in a row"
            ) from None
    return list(range(first, first + count))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
