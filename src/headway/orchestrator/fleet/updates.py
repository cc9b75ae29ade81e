"""Weight updates on their way from the trainer's announcements to the fleet."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from headway.core.protocol import WeightReply, WeightUpdate

POLL_SECONDS = 0.05


class WeightReceivers(Protocol):
    """The fleet, as the updater sees it."""

    async def publish(self, update: WeightUpdate) -> list[WeightReply]: ...


class WeightUpdater:
    """Notices announcements at once, also while an update is under way, and delivers the latest to the fleet.

    `changed` is set at every announcement; `busy` while one is delivered.
    """

    def __init__(
        self,
        announced: Callable[[], WeightUpdate | None],
        fleet: WeightReceivers,
        changed: asyncio.Event,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._announced, self._fleet, self._changed, self._poll_seconds = announced, fleet, changed, poll_seconds
        self._latest: WeightUpdate | None = None
        self._news = asyncio.Event()
        self.busy = False

    @property
    def newest_version(self) -> int:
        """The version announced last, an older one after the trainer went back to a checkpoint; -1 for none."""
        return self._latest.version if self._latest else -1

    @property
    def fingerprint(self) -> str:
        """The fingerprint of that version."""
        return self._latest.fingerprint if self._latest else ""

    async def watch(self) -> None:
        """Poll for announcements until cancelled."""
        while True:
            update = self._announced()
            if update is not None and update != self._latest:
                self.note(update)
            await asyncio.sleep(self._poll_seconds)

    def note(self, update: WeightUpdate) -> None:
        """Take an announcement, to be delivered."""
        self._latest = update
        self._news.set()
        self._changed.set()

    async def deliver(self) -> tuple[WeightUpdate, list[WeightReply]]:
        """Wait for an announcement, bring the fleet to it, and return it with the engines' replies."""
        await self._news.wait()
        self._news.clear()
        assert self._latest is not None
        update = self._latest
        self.busy = True
        replies = await self._fleet.publish(update)
        self.busy = False
        return update, replies
