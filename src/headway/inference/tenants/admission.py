"""Admission: requests of tenants wait here for their turn, in front of an engine of either kind."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway.inference.engine import Engine
from headway.inference.errors import BusyError
from headway.inference.tenants.grants import Grants
from headway.inference.tenants.shares import FairShares, Turn

_LEAST_WAITING = 16
"""Requests that every tenant may have in line, however small its share."""
_LOOK_SECONDS = 0.01


class CrowdedError(BusyError):
    """A tenant has more requests in line than it may."""


class Admission:
    """Lets requests of tenants into `engine` by `FairShares`. `max_waiting` is the length of all lines together, of
    which each tenant has its share.

    An engine whose KV cache is full takes fewer sequences than it has slots. Requests that it could not start yet stay
    few, so that the order of those that follow is decided here.
    """

    def __init__(self, engine: Engine, grants: Grants, max_waiting: int) -> None:
        self._engine, self._grants, self._max_waiting = engine, grants, max_waiting
        self.shares = FairShares(engine.max_running, engine.max_adapters, grants.weight)
        self._slack = max(8, engine.max_running // 8)
        self._looking: asyncio.TimerHandle | None = None
        self.queue_seconds: defaultdict[str, float] = defaultdict(float)
        self.refused: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, tenant: str, size: int, priority: int) -> AsyncIterator[Turn]:
        """Hold a place in the tenant's line, then its slots. Raises CrowdedError where the line is full."""
        most = max(_LEAST_WAITING, int(self._max_waiting * self._grants.share(tenant)))
        if self.shares.waiting_of(tenant) >= most:
            self.refused[tenant] += 1
            raise CrowdedError(f"tenant {tenant} has {most} requests in line, which is its share; try again later")
        turn = self.shares.add(tenant, size, priority, asyncio.Event())
        try:
            self._pump()
            yield turn
        finally:
            self.shares.leave(turn)
            if tenant not in self._grants:
                self.shares.forget(tenant)
            self._pump()

    async def wait(self, turn: Turn) -> bool:
        """Wait until it is the request's turn; False where it was withdrawn before."""
        began = time.monotonic()
        try:
            await turn.owner.wait()
        finally:
            self.queue_seconds[turn.tenant] += time.monotonic() - began
        return turn.running

    def withdraw(self, turn: Turn) -> None:
        """End the wait of a request that has not started."""
        if not turn.running:
            self.shares.leave(turn)
            turn.owner.set()

    def _pump(self) -> None:
        """Start the requests that have room. Where the engine is behind, look again soon."""
        while self.shares.waiting:
            if self._engine.state().waiting >= self._slack:
                if self._looking is None:
                    self._looking = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
                return
            if (turn := self.shares.start()) is None:
                return
            turn.owner.set()

    def _look(self) -> None:
        self._looking = None
        self._pump()
