"""Messages between the host service and its clients, and bytes carried between a WebSocket and a stream."""

import asyncio
import contextlib
import os
import secrets
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import ClientWebSocketResponse, WSMsgType, web

from headway.base.errors import UsageError
from headway.base.files import write_atomic
from headway.sandboxes.sandbox import Limit, Limits

SESSION = "X-Headway-Session"
"""The header that says whose sandbox a request is about."""
HEARTBEAT = 10.0
"""Seconds between signs of life on a session; half as long without an answer ends it and its sandboxes."""
MAX_BODY = 80 << 20
"""Bytes of one request: a file of the largest size that is written or read at once."""
MAX_SNAPSHOT = 2 << 30
END = "end"
"""A text message instead of bytes: nothing more will come from this side."""
_CHUNK = 1 << 16
WebSocket = web.WebSocketResponse | ClientWebSocketResponse
Message = TypeVar("Message")


class Access(msgspec.Struct):
    """The file that lets a client use a host: its address and its token. Readable by its owner only."""

    url: str
    token: str


class CreateRequest(msgspec.Struct):
    """A sandbox that begins with the snapshot of this digest, or with an empty work folder."""

    limits: Limits
    snapshot: str = ""
    readable: list[str] = []


class Created(msgspec.Struct):
    """A sandbox's name, and its limits, which are not above the host's."""

    name: str
    limits: Limits


class ExecuteRequest(msgspec.Struct):
    """A command, and the bytes to keep of its stdout and stderr."""

    argv: list[str]
    seconds: float
    env: dict[str, str] = {}
    stdin: bytes = b""
    cwd: str = ""
    keep: tuple[int, int] = (4096, 4096)


class Executed(msgspec.Struct):
    """The end of a command; its outputs are what `Captured.pack` gave."""

    code: int
    limit: Limit | None
    stdout: tuple[bytes, bytes, int]
    stderr: tuple[bytes, bytes, int]


def decode(data: bytes, kind: type[Message]) -> Message:
    """Read a message. Raises msgspec.DecodeError for anything else."""
    return msgspec.msgpack.decode(data, type=kind)


encode = msgspec.msgpack.encode


def read_access(file: Path) -> Access:
    """Read an access file. Raises UsageError where it is none, or where others on this machine may read it."""
    try:
        access = msgspec.json.decode(file.read_bytes(), type=Access)
        mode = file.stat().st_mode
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{file}: not the access file that `headway sandboxes` writes ({error})") from None
    if mode & 0o077:
        raise UsageError(f"{file} can be read by others, and it holds a token: chmod 600 {file}")
    return access


def write_access(file: Path, url: str) -> Access:
    """Write an access file for `url`; the token of one that is there is kept."""
    token = read_access(file).token if file.exists() else secrets.token_urlsafe(32)
    access = Access(url, token)
    before = os.umask(0o077)
    try:
        write_atomic(file, msgspec.json.format(msgspec.json.encode(access)) + b"\n")
    finally:
        os.umask(before)
    file.chmod(0o600)
    return access


async def carry(socket: WebSocket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes both ways until both directions have ended."""

    async def outward() -> None:
        while data := await reader.read(_CHUNK):
            await socket.send_bytes(data)
        await socket.send_str(END)

    async def inward() -> None:
        while (message := await socket.receive()).type is WSMsgType.BINARY:
            writer.write(message.data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        if message.type is not WSMsgType.TEXT:  # the other side is gone altogether
            raise ConnectionResetError

    with contextlib.suppress(ConnectionError, RuntimeError):
        tasks = [asyncio.ensure_future(work) for work in (outward(), inward())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            writer.close()
