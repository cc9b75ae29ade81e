"""A client of the host service: the sandboxes that it holds end with its connection."""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

from headway.sandboxes.pool import SandboxPool
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import Limits, Sandbox, SandboxError, SandboxGoneError, Snapshot

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Lent:
    """A sandbox that a client holds, with the ports that lead in and out of it."""

    def __init__(self, box: Sandbox, readable: Sequence[Path], back: AsyncExitStack) -> None:
        self.box, self.readable, self._back = box, readable, back
        self._exposed: dict[int, str] = {}
        self._arrived: dict[int, asyncio.Queue[_Streams]] = {}
        self._servers: list[asyncio.Server] = []

    async def connect(self, port: int) -> _Streams:
        """Connect to a port inside. Raises OSError where nobody listens."""
        if port not in self._exposed:
            self._exposed[port] = await self.box.expose(port)
        outside = int(self._exposed[port].rpartition(":")[2])
        return await asyncio.open_connection("127.0.0.1", outside)

    async def listen(self) -> int:
        """Open a port inside whose connections `accept` hands out; returns its number."""
        arrived: asyncio.Queue[_Streams] = asyncio.Queue()
        server = await asyncio.start_server(lambda *streams: arrived.put_nowait(streams), "127.0.0.1", 0)
        self._servers.append(server)
        port = await self.box.forward(server.sockets[0].getsockname()[1])
        self._arrived[port] = arrived
        return port

    async def accept(self, port: int) -> _Streams:
        if port not in self._arrived:
            raise SandboxError(f"port {port} was not forwarded")
        return await self._arrived[port].get()

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        await self._back.aclose()


class Session:
    """One client. `most` bounds what its sandboxes may be given; `shown` are folders that it may ask to see."""

    def __init__(self, pool: SandboxPool, most: Limits, shown: Sequence[Path]) -> None:
        self.name = secrets.token_urlsafe(24)
        self._pool, self._most, self._shown = pool, most, shown
        self._lent: dict[str, Lent] = {}
        self._ended = False

    def __len__(self) -> int:
        return len(self._lent)

    def find(self, name: str) -> Lent:
        """Return a sandbox by name. Raises SandboxGoneError where the client holds none of that name."""
        if name not in self._lent:
            raise SandboxGoneError("the sandbox has ended")
        return self._lent[name]

    async def lend(self, limits: Limits, readable: Sequence[Path], snapshot: Snapshot | None) -> Lent:
        """Start a sandbox, when a place is free: clients that hold few come first."""
        recipe = Recipe(readable=tuple(self._checked(path) for path in readable))
        back = AsyncExitStack()
        context = self._pool.sandbox(recipe, self._bounded(limits), snapshot=snapshot, owner=self.name)
        box = await back.enter_async_context(context)
        if self._ended:
            await back.aclose()
            raise SandboxGoneError("the session has ended")
        lent = self._lent[box.name] = Lent(box, readable, back)
        return lent

    async def give_back(self, name: str) -> None:
        if (lent := self._lent.pop(name, None)) is not None:
            await lent.stop()

    async def end(self) -> None:
        """Stop every sandbox that the client holds."""
        self._ended = True
        await asyncio.gather(*(self.give_back(name) for name in list(self._lent)), return_exceptions=True)

    def _bounded(self, limits: Limits) -> Limits:
        return replace(limits, **{name: min(value, getattr(self._most, name)) for name, value in vars(limits).items()})

    def _checked(self, path: Path) -> Path:
        """Raise SandboxError for a folder that this host does not show, links followed."""
        with suppress(OSError):
            real = path.resolve(strict=True)
            if any(real.is_relative_to(folder) for folder in self._shown):
                return path
        raise SandboxError(f"{path}: this host shows no such folder; start it with `headway sandboxes --show FOLDER`")
