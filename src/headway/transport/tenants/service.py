"""The service of a host: tenants join, send batches, and fetch reports, adapters and checkpoints.

A tenant's token opens the routes of that tenant and no others. Joining demands the host's join token; the list of all
tenants, its admin token. Bodies are msgpack of known shapes, and bounded.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec
from aiohttp import web

from headway.base.errors import HeadwayError
from headway.core.tenants import NAME, HostStatus, StepOutcome, TenantJoin, TenantJoined, TenantStatus, token_hash
from headway.transport.control.tokens import is_bearer
from headway.transport.rollouts import RankBatch
from headway.transport.tenants.client import BUSY, GONE, POLL_SECONDS

logger = logging.getLogger(__name__)

_SHORTEST_TOKEN = 16
_BODY_SECONDS = 120.0
_JOINS_AT_ONCE = 4
"""Bodies of joins that are in memory together; a tenant sends one batch at a time."""
_LOOK_SECONDS = 0.01


class RefusedRequestError(HeadwayError):
    """A request that the host does not follow, with the HTTP status that says so."""

    def __init__(self, reason: str, status: int = 409) -> None:
        super().__init__(reason)
        self.status = status


class Host(Protocol):
    """The tenants behind the service. What returns a Future is done by the thread that trains, between two passes."""

    def token_hash(self, name: str) -> str | None:
        """Return the hash of the token of a tenant, also of one that was dropped; None where there is none."""
        ...

    def join(self, name: str, request: TenantJoin) -> Future[TenantJoined]: ...

    def submit(self, name: str, batch: RankBatch, *, evaluation: bool = False) -> Future[None]:
        """Let a batch wait to be trained, or only its losses to be computed after the step of its number."""
        ...

    def outcome(self, name: str, step: int) -> StepOutcome | None: ...

    def evaluation(self, name: str, step: int) -> StepOutcome | None: ...

    def adapter(self, name: str, step: int) -> bytes | None: ...

    def checkpoint(self, name: str, step: int) -> Future[dict[str, bytes]]: ...

    def leave(self, name: str) -> Future[None]: ...

    def seen(self, name: str, session: str | None) -> None:
        """Note that a tenant spoke. Raises RefusedRequestError where its session is over."""
        ...

    def refused(self, name: str, reason: str) -> None:
        """Count a refused request of a tenant."""
        ...

    def tenant(self, name: str) -> TenantStatus: ...

    def status(self) -> HostStatus: ...


class HostService:
    """The routes around one host. `app` is served by whoever owns it."""

    def __init__(
        self,
        host: Host,
        admin: str,
        join: str,
        request_bytes: int,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when a tenant has joined or left, before that is answered: engines have to know."""
        self._host, self._admin, self._join_token, self._on_change = host, admin, join, on_change
        self._request_bytes = request_bytes
        self._sending = set[str]()
        self._joining = asyncio.Semaphore(_JOINS_AT_ONCE)
        self.app = web.Application(middlewares=[self._guard], client_max_size=request_bytes)
        one = "/v1/tenants/{name}"
        self.app.add_routes(
            [
                web.get("/v1/status", self._get_status),
                web.get("/v1/engines", self._get_engines),
                web.post(f"{one}/join", self._join),
                web.post(f"{one}/batches", self._post_batch),
                web.post(f"{one}/evaluations", self._post_evaluation),
                web.get(f"{one}/outcomes/{{step:\\d{{1,9}}}}", self._get_outcome),
                web.get(f"{one}/evaluations/{{step:\\d{{1,9}}}}", self._get_evaluation),
                web.get(f"{one}/adapters/{{step:\\d{{1,9}}}}", self._get_adapter),
                web.get(f"{one}/checkpoints/{{step:\\d{{1,9}}}}", self._get_checkpoint),
                web.get(one, self._get_tenant),
                web.delete(one, self._leave),
            ]
        )

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Let a request through to the routes that its token opens, and answer failures with one line."""
        name = request.match_info.get("name")
        try:
            self._check_token(request, name)
            if (request.content_length or 0) > self._request_bytes:  # before any of it is read
                raise web.HTTPRequestEntityTooLarge(self._request_bytes, request.content_length or 0)
            return await handler(request)  # type: ignore[no-any-return]
        except RefusedRequestError as error:
            return self._refuse(name, error.status, str(error))
        except (msgspec.DecodeError, ValueError) as error:
            return self._refuse(name, 400, str(error))
        except TimeoutError:
            return self._refuse(name, 408, f"the request did not come within {_BODY_SECONDS:.0f} s")
        except web.HTTPRequestEntityTooLarge:
            return self._refuse(name, 413, "the request is larger than host.request_mb allows")
        except web.HTTPException as error:
            return _error(error.status, error.reason)
        except HeadwayError as error:
            return self._refuse(name, 409, str(error))

    def _check_token(self, request: web.Request, name: str | None) -> None:
        header = request.headers.get("Authorization")
        joins = request.match_info.handler == self._join  # not by its path: a tenant may be called "join"
        if is_bearer(header, self._admin) and not joins:
            return
        if name is None or joins:
            if request.path == "/v1/status" or not is_bearer(header, self._join_token):
                wanted = "admin token" if request.path == "/v1/status" else "join token"
                raise RefusedRequestError(f"this route demands the host's {wanted}", 401)
            return
        known = self._host.token_hash(name) if NAME.fullmatch(name) else None
        given = token_hash((header or "").removeprefix("Bearer "))
        if not hmac.compare_digest(given, known or ""):
            raise RefusedRequestError("this route demands the token of this tenant", 401)
        if request.method != "DELETE":  # a run may leave after its session
            self._host.seen(name, request.query.get("session"))

    def _refuse(self, name: str | None, status: int, reason: str) -> web.Response:
        if name is not None and status != GONE:
            self._host.refused(name, reason)
        return _error(status, reason)

    async def _get_status(self, _request: web.Request) -> web.Response:
        return _reply(self._host.status())

    async def _get_engines(self, request: web.Request) -> web.Response:
        here = (request.host or "").rpartition(":")[0] or "127.0.0.1"
        engines = self._host.status().engines
        return _reply({name: url.replace("//0.0.0.0:", f"//{here}:") for name, url in engines.items()})

    async def _join(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not NAME.fullmatch(name):
            raise RefusedRequestError(f"{name!r} is no tenant's name: a-z, 0-9, '_' and '-', at most 40", 400)
        async with self._joining, asyncio.timeout(_BODY_SECONDS):
            join = msgspec.msgpack.decode(await request.read(), type=TenantJoin)
        if len(join.token) < _SHORTEST_TOKEN:
            raise RefusedRequestError(f"a tenant's token has at least {_SHORTEST_TOKEN} characters", 400)
        known = self._host.token_hash(name)
        if known is not None and not hmac.compare_digest(known, token_hash(join.token)):
            raise RefusedRequestError("another run has this name; choose another with --tenant")
        joined = await asyncio.wrap_future(self._host.join(name, join))
        await asyncio.to_thread(self._on_change)
        return _reply(joined)

    async def _post_batch(self, request: web.Request) -> web.Response:
        return await self._receive_batch(request, evaluation=False)

    async def _post_evaluation(self, request: web.Request) -> web.Response:
        return await self._receive_batch(request, evaluation=True)

    async def _receive_batch(self, request: web.Request, *, evaluation: bool) -> web.Response:
        name = request.match_info["name"]
        if name in self._sending:
            raise RefusedRequestError("a batch of this tenant is being received already; send one at a time", BUSY)
        self._sending.add(name)
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                data = await request.read()
            batch = await asyncio.to_thread(_decode_batch, data)
            await asyncio.wrap_future(self._host.submit(name, batch, evaluation=evaluation))
        finally:
            self._sending.discard(name)
        return _reply({})

    async def _get_outcome(self, request: web.Request) -> web.Response:
        return await self._wait_for(request, self._host.outcome)

    async def _get_evaluation(self, request: web.Request) -> web.Response:
        return await self._wait_for(request, self._host.evaluation)

    async def _wait_for(self, request: web.Request, look: Callable[[str, int], StepOutcome | None]) -> web.Response:
        name, step = request.match_info["name"], int(request.match_info["step"])
        deadline = time.monotonic() + POLL_SECONDS
        pause = _LOOK_SECONDS
        while (outcome := look(name, step)) is None and time.monotonic() < deadline:
            await asyncio.sleep(pause)
            pause = min(1.2 * pause, 0.1)
            self._host.seen(name, request.query.get("session"))
        return web.Response(body=msgspec.msgpack.encode(outcome))  # a skipped step has numbers that JSON has not

    async def _get_adapter(self, request: web.Request) -> web.Response:
        name, step = request.match_info["name"], int(request.match_info["step"])
        adapter = self._host.adapter(name, step)
        if adapter is None:
            raise RefusedRequestError(f"there is no adapter of step {step} here; the host keeps the newest", 404)
        return web.Response(body=adapter)

    async def _get_checkpoint(self, request: web.Request) -> web.Response:
        name, step = request.match_info["name"], int(request.match_info["step"])
        files = await asyncio.wrap_future(self._host.checkpoint(name, step))
        return web.Response(body=msgspec.msgpack.encode(files))

    async def _get_tenant(self, request: web.Request) -> web.Response:
        return _reply(self._host.tenant(request.match_info["name"]))

    async def _leave(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self._host.leave(request.match_info["name"]))
        await asyncio.to_thread(self._on_change)
        return _reply({})


def _decode_batch(data: bytes) -> RankBatch:
    try:
        return RankBatch.decode(data, "request")
    except HeadwayError as error:
        raise RefusedRequestError(f"the body is no batch: {error.__cause__ or error}", 400) from None


def _reply(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
