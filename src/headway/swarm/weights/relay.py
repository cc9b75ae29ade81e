"""A relay of weights: fetches versions from the run or from other relays, verifies them, and serves them on."""

import asyncio
import logging
from pathlib import Path

from aiohttp import web

from headway.swarm.messages.limits import Limits
from headway.swarm.weights.download import Downloader, Mirrors, Share
from headway.swarm.weights.peer import Peer, RefusedError, Retry, SourceError
from headway.swarm.weights.serving import Bandwidth, Guard, version_routes
from headway.swarm.weights.store import ShardStore

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
VERSIONS_KEPT = 3
RATE, BURST, MOST_NAMES = 200.0, 2000.0, 10_000
"""Requests a second and at once, per key and per address: workers ask for many shards."""


class Relay:
    """Serves shards as they arrive, each only after it was verified. It has a key of its own, and no secret of the
    run: a relay that lies is found out by whoever fetches from it."""

    def __init__(
        self,
        mirrors: Mirrors,
        folder: Path,
        run_key: bytes,
        bytes_per_second: float | None = None,
        share: Share | None = None,
    ) -> None:
        self._source: Peer = mirrors.source.peer
        self.downloader = Downloader(mirrors, ShardStore(folder, run_key), share)
        self.bandwidth = Bandwidth(bytes_per_second)
        guard = Guard(Limits(RATE, BURST, MOST_NAMES), Limits(RATE, BURST, MOST_NAMES))
        self.app = web.Application(middlewares=[guard.__call__])
        self.app.add_routes(version_routes(self.downloader.store, self.bandwidth))

    async def watch(self) -> None:
        """Fetch every version that the source shows as its newest, until cancelled. One that is replaced while it is
        fetched is skipped."""
        retry = Retry(longest=5.0)
        while True:
            try:
                await self._follow()
                retry.succeeded()
            except (SourceError, RefusedError) as error:
                logger.warning("%s", error)
                await retry.wait()
            await asyncio.sleep(LOOK_SECONDS)

    async def _follow(self) -> None:
        store = self.downloader.store
        newest = (await self._source.notice()).newest
        if newest < 0 or (store.manifest(newest) is not None and not store.missing(newest)):
            return
        fetching = asyncio.create_task(self.downloader.fetch(newest))
        try:
            while not fetching.done():
                await asyncio.wait({fetching}, timeout=LOOK_SECONDS)
                if (await self._source.notice()).oldest > newest:
                    raise SourceError(f"version {newest} is withdrawn before it was here; the next one is fetched")
            fetching.result()
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        store.keep(newest, VERSIONS_KEPT)
