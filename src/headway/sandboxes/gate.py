"""A bound on how many sandboxes run at once, shared fairly between those who ask."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairGate:
    """Lets `most` in at a time. A free place goes to the owner who holds the fewest, then to who waited longest."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"a gate must let at least one in (got {most})")
        self._most = most
        self._held: Counter[str] = Counter()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        return self._held.total()

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Hold a place for the length of the block."""
        await self._enter(owner)
        try:
            yield
        finally:
            self._held[owner] -= 1
            self._admit()

    async def _enter(self, owner: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((owner, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted and cancelled at once: give the place back
                self._held[owner] -= 1
                self._admit()
            else:
                self._waiting.remove((owner, turn))
            raise

    def _admit(self) -> None:
        while self._waiting and self.held < self._most:
            chosen = min(self._waiting, key=lambda waiting: self._held[waiting[0]])  # the first of equals
            self._waiting.remove(chosen)
            if not chosen[1].done():
                self._held[chosen[0]] += 1
                chosen[1].set_result(None)
