"""The service of a run for strangers: orders, uploads, standings and weights over HTTP, by the routes of `api`."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from http import HTTPStatus

from aiohttp import web

from headway.core.episodes import Episode
from headway.swarm.messages.api import LONGEST_REQUEST, REMEMBERED_REFUSALS, Answer, SwarmTerms, WorkerStanding
from headway.swarm.messages.canonical import InvalidMessageError, decode, encode
from headway.swarm.messages.keys import Signed, SigningKey
from headway.swarm.messages.limits import Limits
from headway.swarm.messages.orders import Contribution
from headway.swarm.messages.signing import verify
from headway.swarm.trust.play import NotJudgedError
from headway.swarm.trust.standing import Standing
from headway.swarm.weights.serving import Bandwidth, Guard, version_routes
from headway.swarm.weights.store import ShardStore
from headway.swarm.work.desk import Desk

logger = logging.getLogger(__name__)

LONGEST_UPLOAD = 16 << 20
MOST_UPLOADS = 8
"""Uploads that are read or judged at a time; others are asked to come again."""
UPLOAD_SECONDS = 60.0
"""Time in which an upload must have arrived."""
PAUSE = "1"
"""Seconds after which a worker for whom there is no work may ask again."""
RATE, BURST, MOST_NAMES = 20.0, 400.0, 10_000
"""Requests a second and at once, per key, and the keys and addresses that are kept in mind."""
ADDRESS_FACTOR = 8
"""Keys' worth of requests that one address may make: several workers can share one."""

Accept = Callable[[str, Contribution, list[Episode], Sequence[str]], None]
"""Takes a worker's key, its contribution, the episodes of it that were accepted, and the orders to drop."""


class SwarmService:
    """The routes around a desk. `app` is served by whoever owns the run.

    `wanted` tells if the run can use more work now. `accept` gets verified groups, and what to drop of a liar's.
    """

    def __init__(
        self,
        desk: Desk,
        key: SigningKey,
        terms: SwarmTerms,
        store: ShardStore,
        *,
        wanted: Callable[[], bool],
        accept: Accept,
        bytes_per_second: float | None = None,
    ) -> None:
        self._desk, self._terms, self._store = desk, encode(key.sign(terms)), store
        self._wanted, self._accept = wanted, accept
        self._refusals: dict[str, deque[str]] = {}
        self._uploads = 0
        self.uploaded: Counter[str] = Counter()
        """Bytes of contributions, by the worker's key."""
        self.bandwidth = Bandwidth(bytes_per_second)
        guard = Guard(
            Limits(RATE, BURST, MOST_NAMES), Limits(ADDRESS_FACTOR * RATE, ADDRESS_FACTOR * BURST, MOST_NAMES)
        )
        self.app = web.Application(middlewares=[guard.__call__], client_max_size=LONGEST_UPLOAD)
        self.app.add_routes(
            [
                web.get("/v1/terms", self._get_terms),
                web.post("/v1/orders", self._post_order),
                web.post("/v1/contributions", self._post_contribution),
                web.get("/v1/standing", self._get_standing),
                *version_routes(store, self.bandwidth),
            ]
        )

    async def _get_terms(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._terms)

    async def _post_order(self, request: web.Request) -> web.Response:
        body = await _read(request, LONGEST_REQUEST)
        key = verify(request.headers.get("Authorization"), request.method, request.path, body).hex()
        standing = self._desk.trust.workers.get(key)
        # Those who hold as many orders as they may get one of them again, wanted or not.
        if not self._wanted() and self._desk.trust.may_order(key):
            return web.Response(status=HTTPStatus.NO_CONTENT, headers={"Retry-After": PAUSE})
        order = self._desk.give(body, request.remote or "")
        if order is None and standing is not None and standing.cut_off:
            return web.Response(status=HTTPStatus.FORBIDDEN, text="this key is cut off: too much of it was refused")
        if order is None:
            return web.Response(status=HTTPStatus.NO_CONTENT, headers={"Retry-After": PAUSE})
        return web.Response(body=encode(order))

    async def _post_contribution(self, request: web.Request) -> web.Response:
        if self._uploads >= MOST_UPLOADS:
            return _come_again("too many uploads at a time")
        self._uploads += 1
        try:
            body = await _read(request, LONGEST_UPLOAD)
            key = verify(request.headers.get("Authorization"), request.method, request.path, body).hex()
            if decode(Signed, body, LONGEST_UPLOAD).key.hex() != key:
                raise InvalidMessageError("a contribution is sent by the worker that signed it")
            return web.Response(body=encode(await self._judge(key, body, request.remote or "")))
        except NotJudgedError as error:
            return _come_again(str(error))
        finally:
            self._uploads -= 1

    async def _judge(self, key: str, body: bytes, address: str) -> Answer:
        taken = await self._desk.take(body, address)
        verdict = taken.verdict
        if verdict.accepted or taken.dropped:
            contribution = decode(Contribution, decode(Signed, body).body)
            self._accept(key, contribution, taken.episodes, taken.dropped)
        if not verdict.accepted:
            logger.info("refused a contribution of %s by %s: %s", key[:16], verdict.check, verdict.reason)
            if key in self._desk.trust.workers:  # others cost memory and get no orders anyway
                kept = self._refusals.setdefault(key, deque(maxlen=REMEMBERED_REFUSALS))
                kept.append(f"{verdict.check}: {verdict.reason}")
        if key in self._desk.trust.workers:
            self.uploaded[key] += len(body)
        standing = self._desk.trust.workers.get(key, Standing())
        return Answer(verdict, standing.accepted, standing.refused, standing.tokens)

    async def _get_standing(self, request: web.Request) -> web.Response:
        key = verify(request.headers.get("Authorization"), request.method, request.path).hex()
        of = self._desk.trust.workers.get(key, Standing())
        return web.Response(
            body=encode(
                WorkerStanding(
                    of.accepted,
                    of.refused,
                    of.abandoned,
                    of.tokens,
                    of.strikes,
                    of.cut_off,
                    tuple(self._refusals.get(key, ())),
                )
            )
        )


def _come_again(reason: str) -> web.Response:
    return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE, text=reason, headers={"Retry-After": PAUSE})


async def _read(request: web.Request, longest: int) -> bytes:
    """Read a body of at most `longest` bytes, in bounded time."""
    if (request.content_length or 0) > longest:
        raise InvalidMessageError(f"a body of {request.content_length} bytes; at most {longest} are taken")
    body = bytearray()
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            async for chunk in request.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > longest:
                    raise InvalidMessageError(f"a body of more than {longest} bytes")
    except TimeoutError:
        raise InvalidMessageError(f"the body did not arrive in {UPLOAD_SECONDS:g} s") from None
    return bytes(body)
