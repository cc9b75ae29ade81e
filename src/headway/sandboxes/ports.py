"""Connections carried through the wall of a sandbox, byte for byte."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[socket.socket]] | Callable[[], Awaitable[_Streams]]
"""Opens the other end of a connection."""
_CHUNK = 1 << 16


def relay(connect: Connect) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Return a handler for `asyncio.start_server` that joins each connection with the one that `connect` opens."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            opened = await connect()
            there = opened if isinstance(opened, tuple) else await asyncio.open_connection(sock=opened)
        except Exception:  # nobody listens there, or the sandbox is gone: the caller sees its connection close
            writer.close()
            return
        try:
            await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))
        finally:
            writer.close()
            there[1].close()

    return handle


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, RuntimeError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


def to_loopback(port: int) -> Connect:
    """Return what connects to a port of this machine."""

    async def connect() -> _Streams:
        return await asyncio.open_connection("127.0.0.1", port)

    return connect
