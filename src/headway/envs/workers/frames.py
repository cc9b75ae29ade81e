"""The protocol of a pool and its workers over a socket: typed frames, length first. Never pickle.

Episodes have numbers, which a pool counts up.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from headway.core.episodes import Episode, EpisodeRequest, Task
from headway.envs.packages.versions import CodeVersion
from headway.envs.reply_log import Recorded

_LENGTH = struct.Struct("!I")
MAX_FRAME = 1 << 30


class Start(msgspec.Struct, tag=True):
    """The first frame to a worker: what it serves. `tasks` asks for the list of tasks in return, `context` is the
    rule that settings name, `token` what engines are shown."""

    env: str
    args: dict[str, Any]
    name: str
    model: str
    renderer: str
    family: str | None
    tasks: bool
    context: dict[str, Any] | None = None
    turn_timeout: float | None = None
    token: str | None = None


class Run(msgspec.Struct, tag=True):
    """Run an episode; one that a lost worker began `spent` seconds ago goes on after its `replies`. With `recorded`
    ones it is played again, and nothing is sampled."""

    number: int
    request: EpisodeRequest
    replies: list[bytes] = []
    spent: float = 0.0
    recorded: Recorded | None = None


class Cancel(msgspec.Struct, tag=True):
    number: int


class Ping(msgspec.Struct, tag=True):
    pass


class Stop(msgspec.Struct, tag=True):
    """Cancel what runs, close the environment, exit."""


class Ready(msgspec.Struct, tag=True):
    """The environment is loaded; `code` is what it was loaded from. `resumable` says that its episodes can go on
    in another worker."""

    tasks: list[Task]
    code: list[CodeVersion]
    resumable: bool = False


class Failed(msgspec.Struct, tag=True):
    """The worker could not start; `message` is for the user."""

    message: str


class Replied(msgspec.Struct, tag=True):
    """The policy replied in an episode; `reply` is for the worker that goes on with it, should this one die."""

    number: int
    reply: bytes


class Done(msgspec.Struct, tag=True):
    number: int
    episode: Episode


class Pong(msgspec.Struct, tag=True):
    pass


class Retiring(msgspec.Struct, tag=True):
    """The worker holds threads that hang: send nothing new, replace it when what runs is done."""

    reason: str


ToWorker = Start | Run | Cancel | Ping | Stop
FromWorker = Ready | Failed | Replied | Done | Pong | Retiring

to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_encoder = msgspec.msgpack.Encoder()


class FrameConnection(asyncio.Protocol):
    """Sends frames, and hands each received one to `received`. `lost` is called once, at the end."""

    def __init__(self, received: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        self._received = received
        self._lost = lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def send(self, frame: ToWorker | FromWorker) -> None:
        """Queue `frame`; dropped where the other side is gone, which `lost` tells of."""
        if self._transport is not None and not self._transport.is_closing():
            data = _encoder.encode(frame)
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, start)
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes")
            end = start + _LENGTH.size + size
            if len(buffer) < end:
                break
            frame = bytes(buffer[start + _LENGTH.size : end])
            start = end
            self._received(frame)
        del buffer[:start]
