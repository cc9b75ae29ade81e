"""One server of the swarm, asked by strangers: signed requests, bounded answers, pauses between attempts."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp

from headway.base.errors import HeadwayError
from headway.swarm.messages.canonical import InvalidMessageError, decode
from headway.swarm.messages.keys import SigningKey
from headway.swarm.messages.signing import authorization
from headway.swarm.weights.manifest import LONGEST_MANIFEST, VersionNotice

LONGEST_ANSWER = 16 << 20
_BUFFER = 1 << 20
"""Bytes that may arrive before the connection is paused: with the default, shards would come in small pieces."""
_TIMEOUT = aiohttp.ClientTimeout(total=120, sock_connect=10, sock_read=60)


class SourceError(HeadwayError):
    """A server did not answer, or not with what was asked for; another attempt or source may succeed."""


class NotYetError(SourceError):
    """A relay waits for these bytes itself; they will be there."""


class RefusedError(HeadwayError):
    """A server will not answer this request, however often it is sent: it has no such version, or takes no such
    message."""


class CutOffError(HeadwayError):
    """The run takes nothing more from this key."""


@dataclass(slots=True)
class Peer:
    """One server of the swarm, asked with the contributor's key."""

    url: str
    session: aiohttp.ClientSession
    key: SigningKey

    async def get(self, path: str, longest: int = LONGEST_ANSWER) -> bytes:
        """Return the body of the answer. Raises SourceError and RefusedError."""
        return (await self._ask("GET", path, b"", longest))[1]

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer. Raises SourceError, RefusedError, and CutOffError where this key is cut
        off."""
        return await self._ask("POST", path, body, LONGEST_ANSWER)

    async def _ask(self, method: str, path: str, body: bytes, longest: int) -> tuple[int, bytes]:
        headers = {"Authorization": authorization(self.key, method, path, body)}
        try:
            async with self.session.request(
                method, self.url + path, data=body or None, headers=headers, timeout=_TIMEOUT, read_bufsize=_BUFFER
            ) as answer:
                content = bytearray()
                async for chunk in answer.content.iter_any():
                    content += chunk
                    if len(content) > longest:
                        raise SourceError(f"{self.url} answers with more than {longest} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SourceError(f"no answer from {self.url}: {error or type(error).__name__}") from None
        # Only the beginning: to read a shard's bytes as text would take longer than to fetch them.
        said = bytes(content[:300]).decode(errors="replace")
        if answer.status == HTTPStatus.FORBIDDEN:
            raise CutOffError(said)
        message = f"{self.url} answers {answer.status}: {said}"
        if answer.status == HTTPStatus.TOO_EARLY:
            raise NotYetError(message)
        if answer.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
            raise RefusedError(message)
        if answer.status not in (HTTPStatus.OK, HTTPStatus.NO_CONTENT, HTTPStatus.PARTIAL_CONTENT):
            raise SourceError(message)
        return answer.status, bytes(content)

    async def notice(self) -> VersionNotice:
        try:
            return decode(VersionNotice, await self.get("/v1/versions", 4096))
        except InvalidMessageError as error:
            raise SourceError(f"{self.url}: {error}") from None

    async def manifest(self, version: int) -> bytes:
        return await self.get(f"/v1/versions/{version}/manifest", LONGEST_MANIFEST)

    async def shard(self, version: int, index: int, size: int) -> bytes:
        return await self.get(f"/v1/versions/{version}/shards/{index}", size)


@dataclass(slots=True)
class Retry:
    """Pauses between attempts: longer after each failure, with some chance, so that workers do not come all at once."""

    first: float = 0.2
    longest: float = 10.0
    failures: int = 0
    since: float = field(default_factory=time.monotonic)

    async def wait(self) -> None:
        pause = min(self.longest, self.first * 2**self.failures)
        self.failures += 1
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    def succeeded(self) -> None:
        self.failures = 0
