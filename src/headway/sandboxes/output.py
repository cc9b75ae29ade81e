"""Output of a command, bounded: the beginning and the end are kept, the middle is read and dropped."""

import asyncio
import contextlib
import os
from collections.abc import Callable

CHUNK = 1 << 16
PIPE_GRACE = 0.25
"""Seconds that a command's pipes are read after it has ended, while processes it left behind hold them."""
FLOOD = 64
"""A command that writes this many times what is kept is ended: reading on would only burn time."""


class Captured:
    """Up to `limit` bytes of what is written to a pipe. `left_out` counts the rest.

    Open with `pipe()`, hand the returned end to the child and close it here, then await `finished`.
    """

    def __init__(self, limit: int, on_flood: Callable[[], None] | None = None) -> None:
        self.limit = limit
        self._head, self._tail = bytearray(), bytearray()
        self._total = 0
        self._outlet = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None
        self.on_flood = on_flood

    @property
    def left_out(self) -> int:
        return max(0, self._total - self.limit)

    def kept(self) -> bytes:
        """The bytes that were kept, without a mark where some are missing."""
        return bytes(self._head + self._tail[-(self.limit - self.limit // 2) :])

    def text(self) -> str:
        if not self.left_out:
            return (self._head + self._tail).decode(errors="replace")
        tail = self._tail[-(self.limit - self.limit // 2) :].decode(errors="replace")
        return f"{self._head.decode(errors='replace')}\n[{self.left_out} bytes left out]\n{tail}"

    def pack(self) -> tuple[bytes, bytes, int]:
        """Return what `unpack` needs elsewhere: the beginning, the end, and the number of bytes in all."""
        return bytes(self._head), bytes(self._tail[-(self.limit - self.limit // 2) :]), self._total

    def unpack(self, head: bytes, tail: bytes, total: int) -> None:
        """Take over what was captured elsewhere with the same limit."""
        self._head, self._tail, self._total = bytearray(head), bytearray(tail), total

    def pipe(self) -> int:
        """Start reading from a new pipe; returns the end to write to."""
        self._outlet, inlet = os.pipe()
        os.set_blocking(self._outlet, False)
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._loop.add_reader(self._outlet, self._readable)
        return inlet

    async def finished(self, grace: float) -> None:
        """Wait until all writers have closed the pipe, at most `grace` seconds: leftover processes may hold it."""
        if self._ended is not None and not self._ended.done():
            await asyncio.wait([self._ended], timeout=grace)
        self.close()

    def close(self) -> None:
        if self._outlet >= 0 and self._loop is not None:
            self._loop.remove_reader(self._outlet)
            os.close(self._outlet)
            self._outlet = -1
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def feed(self, data: bytes) -> None:
        self._total += len(data)
        room = self.limit // 2 - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self.limit + CHUNK:
            del self._tail[: -self.limit]
        if self._total > FLOOD * self.limit and self.on_flood is not None:
            self.on_flood()
            self.on_flood = None

    def _readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if data := os.read(self._outlet, CHUNK):
                self.feed(data)
            else:
                self.close()
