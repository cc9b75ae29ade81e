"""The `host` back end: sandboxes that a `headway sandboxes` service runs on another machine."""

import asyncio
import logging
from pathlib import Path

from headway.sandboxes.backend import SnapshotBackend
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.remote.hosted import HostedSandbox
from headway.sandboxes.remote.link import HostUnreachableError, Link
from headway.sandboxes.remote.snapshots import digest
from headway.sandboxes.remote.wire import Created, CreateRequest, decode, encode, read_access
from headway.sandboxes.sandbox import Limits, Sandbox, Snapshot

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


class HostBackend(SnapshotBackend):
    """Asks a host for sandboxes. If the connection to it is lost they all end; the next one opens another."""

    name = "host"
    takes = 'the access file of a host, as in "host:/path/to/access.json"'
    patience = 60.0
    """Seconds to wait for a host that does not answer: one that was killed may be starting again."""

    def __init__(self, access: str) -> None:
        super().__init__()
        self._access = read_access(Path(access))
        self._opening = asyncio.Lock()
        self._link: Link | None = None

    @classmethod
    def check(cls) -> None:
        return None

    async def create(
        self, recipe: Recipe | None = None, limits: Limits | None = None, snapshot: Snapshot | None = None
    ) -> Sandbox:
        recipe, limits = recipe or Recipe(), limits or Limits()
        snapshot = snapshot or await self._beginning(recipe)
        return await self._begin(recipe, limits, snapshot)

    async def close(self) -> None:
        self._prepared.cancel()
        if self._link is not None:
            await self._link.close()

    async def _start(self, recipe: Recipe, limits: Limits) -> Sandbox:
        return await self._begin(recipe, limits, None)

    async def _begin(self, recipe: Recipe, limits: Limits, snapshot: Snapshot | None) -> Sandbox:
        async with self._opening:
            if self._link is not None and self._link.lost.done():
                await self._link.close()
                self._link = None
            link = self._link = self._link or await self._open()
        name = digest(snapshot) if snapshot else ""
        request = CreateRequest(limits, name, [str(path) for path in recipe.readable])
        reply = await link.with_snapshot("POST", "/v1/sandboxes", snapshot, encode(request))
        return HostedSandbox(link, decode(reply, Created))

    async def _open(self) -> "Link":
        deadline = asyncio.get_running_loop().time() + self.patience
        while True:
            try:
                return await Link.open(self._access.url, self._access.token)
            except HostUnreachableError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                logger.warning("%s; trying again", error)
                await asyncio.sleep(_RETRY_SECONDS)
