"""An MCP server in a sandbox: its stdin and stdout as the streams that a client of the `mcp` package uses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from headway.base.errors import HeadwayError
from headway.envs.adapters import require
from headway.sandboxes.sandbox import Process

MAX_MESSAGE = 4 << 20
"""Bytes of one message. A server that sends a longer one is cut off: nothing else bounds what it makes us keep."""
_CHUNK = 64 << 10


@asynccontextmanager
async def boxed_streams(process: Process) -> AsyncIterator[tuple[Any, Any]]:
    """Carry messages, one JSON text per line, from and to a process for as long as the block runs; then kill it."""
    streams = require("anyio", "mcp", "mcp").create_memory_object_stream
    to_client, from_server = streams(0)
    to_server, from_client = streams(0)
    work: list[Awaitable[None]] = [
        _receive(process, to_client),
        _send(process, from_client, to_client),
        _discard(process.stderr),
    ]
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        yield from_server, to_server
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (to_client, from_server, to_server, from_client):
            stream.close()
        with contextlib.suppress(OSError, HeadwayError):  # it may be gone, and its sandbox with it
            await process.kill()


async def _receive(process: Process, to_client: Any) -> None:
    """Pass on what the server says. The client's calls fail once the stream is closed: at the server's end."""
    parse = _parser()
    async with to_client:
        rest = b""
        while len(rest) <= MAX_MESSAGE and (chunk := await process.stdout.read(_CHUNK)):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                await to_client.send(parse(line))


async def _send(process: Process, from_client: Any, to_client: Any) -> None:
    try:
        async for sent in from_client:
            text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
            await process.write(f"{text}\n".encode())
    except (OSError, HeadwayError):
        to_client.close()


async def _discard(stream: asyncio.StreamReader) -> None:
    """Read what nobody wants: a server whose stderr is full would wait."""
    while await stream.read(_CHUNK):
        pass


def _parser() -> Callable[[bytes], Any]:
    """Return a function that makes a client's message of a line, or the error that the client is told instead."""
    message = require("mcp.shared.message", "mcp", "mcp").SessionMessage
    adapter = require("mcp_types", "mcp", "mcp").jsonrpc_message_adapter

    def parse(line: bytes) -> Any:
        try:
            return message(adapter.validate_json(line, by_name=False))
        except ValueError as error:
            return error

    return parse
