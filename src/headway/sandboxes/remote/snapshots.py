"""Snapshots that a host keeps by their digest, so that clients send each of them once."""

import asyncio
import hashlib
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path

from headway.sandboxes.sandbox import SandboxError, Snapshot

KEPT_BYTES = 4 << 30


def digest(snapshot: Snapshot) -> str:
    return hashlib.sha256(snapshot.archive).hexdigest()


class SnapshotStore:
    """Files in a folder, up to `most` bytes in all; those not used for longest go first."""

    def __init__(self, folder: Path, most: int = KEPT_BYTES) -> None:
        self._folder, self._most = folder, most
        self._sizes: OrderedDict[str, int] = OrderedDict()

    async def put(self, name: str, chunks: AsyncIterator[bytes], largest: int) -> None:
        """Keep what arrives. Raises SandboxError where it is too long or its digest is not `name`."""
        size, hasher = 0, hashlib.sha256()
        with tempfile.NamedTemporaryFile(dir=self._folder) as file:
            async for chunk in chunks:
                size += len(chunk)
                if size > largest:
                    raise SandboxError(f"a snapshot may have {largest} bytes")
                hasher.update(chunk)
                file.write(chunk)
            if hasher.hexdigest() != name:
                raise SandboxError("this is not the snapshot that was announced")
            file.flush()
            (self._folder / name).unlink(missing_ok=True)
            (self._folder / name).hardlink_to(file.name)
        self._sizes[name] = size
        self._sizes.move_to_end(name)
        while sum(self._sizes.values()) > self._most and len(self._sizes) > 1:
            (self._folder / self._sizes.popitem(last=False)[0]).unlink(missing_ok=True)

    async def keep(self, snapshot: Snapshot) -> None:
        """Keep a snapshot that was made here."""

        async def whole() -> AsyncIterator[bytes]:
            yield snapshot.archive

        await self.put(digest(snapshot), whole(), len(snapshot.archive))

    async def get(self, name: str) -> Snapshot | None:
        if name not in self._sizes:
            return None
        self._sizes.move_to_end(name)
        return Snapshot(await asyncio.to_thread((self._folder / name).read_bytes))
