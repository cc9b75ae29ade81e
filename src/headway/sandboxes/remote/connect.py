"""Commands over Connect, the protocol that E2B's and Prime's sandboxes speak, in its binary form.

Both have the same messages: a request with a command, and events with its pid, its output and its end.
"""

import json
import struct
from collections.abc import AsyncIterator, Sequence

from aiohttp import StreamReader

from headway.sandboxes.sandbox import SandboxError

HEADERS = {"Content-Type": "application/connect+proto", "Connect-Protocol-Version": "1"}
_FRAME = struct.Struct(">BI")
_LAST = 2
_MAX_MESSAGE = 64 << 20


def start_request(argv: Sequence[str]) -> bytes:
    """Pack the request that starts a command."""
    command = _field(1, argv[0].encode()) + b"".join(_field(2, word.encode()) for word in argv[1:])
    return frame(_field(1, command))


def frame(message: bytes, flags: int = 0) -> bytes:
    return _FRAME.pack(flags, len(message)) + message


async def read_output(body: StreamReader) -> tuple[int, bytes, bytes]:
    """Read events to the command's end; returns exit code, stdout and stderr. Raises SandboxError where none comes."""
    out, err, code = bytearray(), bytearray(), None
    async for message in _messages(body):
        event = fields(fields(message).get(1, [b""])[-1])
        for data in event.get(2, []):
            for number, target in ((1, out), (2, err)):
                target += b"".join(fields(data).get(number, []))
        for end in event.get(3, []):
            value = fields(end).get(1, [b"\0"])[-1]
            number = int.from_bytes(value, "little")
            code = (number >> 1) ^ -(number & 1)  # zigzag: a process that a signal ended may have -1
    if code is None:
        raise SandboxError("the command's answer ended before the command did")
    return code, bytes(out), bytes(err)


async def _messages(body: StreamReader) -> AsyncIterator[bytes]:
    while True:
        flags, length = _FRAME.unpack(await body.readexactly(_FRAME.size))
        if length > _MAX_MESSAGE:
            raise SandboxError(f"a message of {length} bytes")
        message = await body.readexactly(length)
        if flags & _LAST:
            if problem := json.loads(message or b"{}").get("error"):
                raise SandboxError(f"{problem.get('code', 'error')}: {problem.get('message', '')}")
            return
        yield message


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    packed = bytearray()
    while value > 0x7F:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*packed, value])


def fields(message: bytes) -> dict[int, list[bytes]]:
    """Split a protobuf message into its fields by number; numbers are given as little-endian bytes."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    try:
        while at < len(message):
            key = varint()
            if key & 7 == 0:
                data = varint().to_bytes(10, "little")
            elif key & 7 in (1, 2, 5):
                length = {1: 8, 5: 4}.get(key & 7) or varint() if key & 7 != 2 else varint()
                data = message[at : at + length]
                at += length
            else:
                raise SandboxError("a message that is no protobuf")
            found.setdefault(key >> 3, []).append(data)
    except IndexError:
        raise SandboxError("a message that is cut off") from None
    return found
