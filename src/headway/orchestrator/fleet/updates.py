"""Weights on their way from the trainer's announcements to the fleet."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from headway.core.protocol import WeightReply, WeightUpdate

LOOK_SECONDS = 0.05


class Receivers(Protocol):
    """The fleet, as the courier sees it."""

    async def publish(self, update: WeightUpdate) -> list[WeightReply]: ...


class Courier:
    """Notices announcements at once, also while an update is still under way, and brings the latest to the fleet.

    `noticed` is called for every announcement, `brought` when the fleet has it.
    """

    def __init__(
        self,
        announced: Callable[[], WeightUpdate | None],
        fleet: Receivers,
        *,
        noticed: Callable[[], None],
        brought: Callable[[WeightUpdate, list[WeightReply]], None],
    ) -> None:
        self._announced, self._fleet, self._noticed, self._brought = announced, fleet, noticed, brought
        self._latest: WeightUpdate | None = None
        self._news = asyncio.Event()
        self.busy = False

    @property
    def newest_version(self) -> int:
        """What the trainer announced last, which is an older one after it went back to a checkpoint; -1 for nothing."""
        return self._latest.version if self._latest else -1

    async def watch(self) -> None:
        """Forever: notice what is announced."""
        while True:
            update = self._announced()
            if update is not None and update != self._latest:
                self._latest = update
                self._news.set()
                self._noticed()
            await asyncio.sleep(LOOK_SECONDS)

    async def bring(self) -> None:
        """Forever: bring the fleet to what was announced last."""
        while True:
            await self._news.wait()
            self._news.clear()
            if (update := self._latest) is not None:
                self.busy = True
                replies = await self._fleet.publish(update)
                self.busy = False
                self._brought(update, replies)
