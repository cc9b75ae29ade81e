"""Downloads of versions from a source and relays that nobody vouches for: each shard is verified before it is kept."""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.base.errors import HeadwayError
from headway.swarm.messages.canonical import InvalidMessageError
from headway.swarm.weights.manifest import WeightManifest
from headway.swarm.weights.peer import NotYetError, Peer, RefusedError, SourceError
from headway.swarm.weights.store import ShardStore

logger = logging.getLogger(__name__)

PARALLEL = 4
"""Shards that are fetched at a time."""
EXPLORE = 0.15
"""Chance that a relay is chosen regardless of its speed: slow ones may have become fast."""
SMOOTHING = 0.3
REST_SECONDS = 5.0
"""Time that a server is left alone after it failed."""
PATIENCE_SECONDS = 120.0
"""Time that a worker waits for a shard which relays expect themselves."""
ATTEMPTS = 12
"""Attempts at one shard before the download is given up."""


@dataclass(slots=True)
class Mirror:
    """A server with its measured speed in bytes a second, None before the first shard. A liar is never asked again."""

    peer: Peer
    speed: float | None = None
    rests_until: float = 0.0
    lied: bool = False
    shards: int = 0

    def fetched(self, size: int, seconds: float) -> None:
        now = size / max(seconds, 1e-6)
        self.speed = now if self.speed is None else (1 - SMOOTHING) * self.speed + SMOOTHING * now
        self.shards += 1

    def failed(self, now: float) -> None:
        self.rests_until = now + REST_SECONDS


@dataclass(slots=True)
class Mirrors:
    """The run's own server, and relays, which are asked first: the source sends a version to few."""

    source: Mirror
    relays: list[Mirror] = field(default_factory=list)
    chance: random.Random = field(default_factory=random.Random)

    @classmethod
    def of(cls, source: Peer, relays: Sequence[Peer]) -> "Mirrors":
        return cls(Mirror(source), [Mirror(peer) for peer in relays])

    def choose(self, now: float) -> Mirror:
        """Pick a relay by its speed, with some chance any; the source where no relay can be asked."""
        ready = [mirror for mirror in self.relays if not mirror.lied and now >= mirror.rests_until]
        if not ready:
            return self.source
        untried = [mirror for mirror in ready if mirror.speed is None]
        if untried or self.chance.random() < EXPLORE:
            return self.chance.choice(untried or ready)
        return self.chance.choices(ready, [mirror.speed or 0.0 for mirror in ready])[0]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of every version that a relay asks of the source: each `count`-th shard, beginning with `first`. Others
    come from relays that have the other shares, so that the source sends everything once."""

    first: int = 0
    count: int = 1

    def has(self, index: int) -> bool:
        return index % self.count == self.first


class Downloader:
    """Brings versions into a store. What was there stays: a download goes on after a break.

    With a `share`, the shards in it are asked of the source alone, and all others of relays first.
    """

    def __init__(self, mirrors: Mirrors, store: ShardStore, share: Share | None = None) -> None:
        self.mirrors, self.store, self._share = mirrors, store, share

    async def manifest(self, version: int) -> WeightManifest:
        """Fetch a version's manifest, from any server: the run's signature counts. Raises SourceError, and RefusedError
        where the source has that version no more."""
        if (known := self.store.manifest(version)) is not None:
            return known
        failure: HeadwayError = SourceError(f"nobody has version {version}")
        for _ in range(ATTEMPTS):
            mirror = self.mirrors.choose(time.monotonic())
            try:
                return self._added(version, await mirror.peer.manifest(version))
            except InvalidMessageError as error:
                self._found_lying(mirror, str(error))
                failure = error
            except (SourceError, RefusedError) as error:
                failure = error
                if mirror is self.mirrors.source:
                    raise
                if isinstance(error, RefusedError):
                    # It does not know this version yet, and may have its shards soon: only the manifest is asked of
                    # the source.
                    return self._added(version, await self.mirrors.source.peer.manifest(version))
                mirror.failed(time.monotonic())
        raise SourceError(str(failure))

    def _added(self, version: int, signed: bytes) -> WeightManifest:
        manifest = self.store.add(signed)
        if manifest.version != version:
            raise InvalidMessageError(f"the manifest is of version {manifest.version}, not {version}")
        return manifest

    async def fetch(self, version: int) -> WeightManifest:
        """Fetch all shards of a version that neither it nor another version here has. Raises SourceError where one
        can't be had now, and RefusedError where the source has it no more."""
        manifest, began = await self.manifest(version), time.monotonic()
        await asyncio.to_thread(self.store.adopt, version)
        # In the same order as everyone else: a relay has the beginning first, and workers wait only where it ends.
        left = self.store.missing(version)[::-1]
        size = sum(manifest.sizes[index] for index in left)
        # Waiting for other relays must not hold up the share that they wait for.
        own = [index for index in left if self._is_own(index)]
        parts = (own, [index for index in left if not self._is_own(index)])
        tasks = [
            asyncio.create_task(self._fetch_some(manifest, part))
            for part in parts
            for _ in range(min(PARALLEL, len(part)))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if size:
            seconds = time.monotonic() - began
            logger.info("version %d is here: fetched %d of %d bytes in %.1f s", version, size, manifest.size, seconds)
        return manifest

    def _is_own(self, index: int) -> bool:
        return self._share is not None and self._share.has(index)

    async def _fetch_some(self, manifest: WeightManifest, left: list[int]) -> None:
        while left:
            await self._fetch_shard(manifest, left.pop())

    async def _fetch_shard(self, manifest: WeightManifest, index: int) -> None:
        failure, attempt, give_up = "", 0, time.monotonic() + PATIENCE_SECONDS
        while attempt < ATTEMPTS:
            began = time.monotonic()
            mirror = self.mirrors.source if self._is_own(index) else self.mirrors.choose(began)
            try:
                data = await mirror.peer.shard(manifest.version, index, manifest.sizes[index])
            except NotYetError as error:
                failure = str(error)
                if time.monotonic() > give_up:  # others may have it, or the source must send it once more
                    mirror.failed(time.monotonic())
                    attempt += 1
            except (SourceError, RefusedError) as error:
                failure = str(error)
                mirror.failed(time.monotonic())
                attempt += 1
                if mirror is self.mirrors.source:
                    if isinstance(error, RefusedError):
                        raise
                    await asyncio.sleep(min(2.0, 0.1 * 2**attempt))
            else:
                if self.store.put(manifest.version, index, data):
                    mirror.fetched(len(data), time.monotonic() - began)
                    return
                failure = f"{mirror.peer.url} sent a shard that is not the run's"
                self._found_lying(mirror, f"shard {index} of version {manifest.version} is not the run's")
                attempt += 1
        raise SourceError(f"shard {index} of version {manifest.version} can't be had: {failure}")

    def _found_lying(self, mirror: Mirror, reason: str) -> None:
        """Ask a relay never again that sent something else than the run signed; the source gets a rest only, since
        there is no other, and the line may be at fault."""
        logger.warning("%s is not used any more: %s", mirror.peer.url, reason)
        mirror.lied = mirror is not self.mirrors.source
        mirror.failed(time.monotonic())
