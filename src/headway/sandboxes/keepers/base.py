"""A sandbox whose first process is a keeper of ours: what holds for both protocols."""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from os import fsencode
from typing import Protocol

from headway.sandboxes.ports import Connect, relay
from headway.sandboxes.sandbox import HOME, Limits, Sandbox, Snapshot

VARIABLES = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": HOME,
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True)
class Life:
    """A sandbox's life as its back end holds it."""

    kill: Callable[[], None]
    """Ends the sandbox from outside."""
    gone: "asyncio.Future[str | None]"
    """Done once nothing of the sandbox is left, with the limit that killed it, if one did."""
    again: Callable[[Snapshot], Awaitable[Sandbox]]
    """Starts another one that begins with a snapshot."""


class _Connection(Protocol):
    def close(self) -> None: ...


class KeeperSandbox(Sandbox):
    """Talks to a keeper over `connection`, whose end ends the sandbox."""

    def __init__(self, name: str, limits: Limits, connection: _Connection, life: Life) -> None:
        self.name, self.limits, self._life = name, limits, life
        self._hang_up = connection.close
        self._servers: list[asyncio.Server] = []

    @abstractmethod
    def _inside(self, port: int) -> Connect:
        """Return what opens a connection to a port inside."""

    async def expose(self, port: int) -> str:
        server = await asyncio.start_server(relay(self._inside(port)), "127.0.0.1", 0)
        self._servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def fork(self) -> Sandbox:
        return await self._life.again(await self.snapshot())

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        self._hang_up()
        self._life.kill()
        await asyncio.shield(self._life.gone)


def packed_command(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> bytes:
    """Pack a command for a keeper: folder, number of words, words and variables, each ended by NUL."""
    words = [cwd, str(len(argv)), *argv, *(f"{name}={value}" for name, value in env.items())]
    if any("\0" in word for word in words):
        raise ValueError("a command, its folder and its variables can't contain NUL")
    return b"".join(fsencode(word) + b"\0" for word in words)
