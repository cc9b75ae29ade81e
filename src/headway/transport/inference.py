"""The client of the inference protocol: one engine, typed bodies, errors that say whether trying again may help."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from headway.base.errors import HeadwayError
from headway.core.protocol import (
    FRAMES,
    MSGPACK,
    EngineState,
    ErrorBody,
    GenerateChunk,
    GenerateChunkChoice,
    GenerateRequest,
    GenerateResponse,
    WeightReply,
    WeightState,
    WeightUpdate,
)
from headway.core.tenants import TenantGrant, TenantUse
from headway.transport.tls import client_context

PauseMode = Literal["keep", "wait", "abort"]
Body = TypeVar("Body")

_encoder = msgspec.json.Encoder()
_LARGEST_FRAME = 2**30
_RETRYABLE_STATUS = frozenset({408, 429, 500, 502, 503, 504})


class EngineError(HeadwayError):
    """A call to an engine failed. `status` is the HTTP status, 0 where no reply came.

    `retryable`: the same call may succeed later or at another engine. `retry_after` is what the engine asked
    for, in seconds.
    """

    def __init__(
        self, status: int, message: str, *, retryable: bool, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retryable = retryable
        self.param = param
        self.retry_after = retry_after


class InferenceClient:
    """Talks to one engine at `base_url`. Admin calls need the run's `token`.

    A `session` that is passed in stays the caller's; otherwise one is opened at the first call, without limits on
    connections or time: how long to wait is the caller's decision. Cancelling a call drops its connection, and
    the engine stops working on it.
    """

    def __init__(
        self, base_url: str, *, token: str | None = None, session: aiohttp.ClientSession | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = session
        self._owns_session = session is None

    async def generate(self, request: GenerateRequest, *, session_id: str | None = None) -> GenerateResponse:
        """`session_id` goes along as X-Session-ID: routers keep the calls of one session at one engine.

        The reply comes in binary from servers that know how.
        """
        headers = {"Accept": f"{MSGPACK}, application/json;q=0.9"}
        if session_id:
            headers["X-Session-ID"] = session_id
        return await self._call("POST", "/inference/v1/generate", GenerateResponse, request, headers)

    async def generate_stream(
        self, request: GenerateRequest, *, session_id: str | None = None
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Yield the reply in parts, as they come; a server that does not stream sends one part. The last one of a
        choice has a finish reason: a stream that ends without raises EngineError, as one that breaks does."""
        url = self.base_url + "/inference/v1/generate"
        headers = {**self._headers, "Accept": f"{FRAMES}, {MSGPACK};q=0.9, application/json;q=0.8"}
        headers["Content-Type"] = "application/json"
        if session_id:
            headers["X-Session-ID"] = session_id
        try:
            async with self._open().post(url, data=_encoder.encode(request), headers=headers) as reply:
                if reply.status != 200:
                    raise _error(reply, await reply.read())
                if reply.content_type != FRAMES:
                    binary = reply.content_type == MSGPACK
                    yield _as_chunk(_decode(url, await reply.read(), GenerateResponse, binary=binary))
                    return
                async for chunk in _frames(url, reply.content):
                    yield chunk
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise EngineError(0, f"the reply from the engine at {url} broke off: {reason}", retryable=True) from error

    async def generate_raw(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the reply as the server sent it, for servers whose replies have another shape."""
        return await self._call("POST", "/inference/v1/generate", dict[str, Any], request)

    async def models(self, kind: type[Body]) -> Body:
        """The list of models, as a `kind`."""
        return await self._call("GET", "/v1/models", kind)

    async def state(self, *, prefixes: bool = False) -> EngineState:
        """Ask for the engine's load, and for a summary of the prefixes in its cache."""
        return await self._call("GET", "/state?prefixes=1" if prefixes else "/state", EngineState)

    async def weights(self) -> WeightState:
        return await self._call("GET", "/weights", WeightState)

    async def update_weights(self, update: WeightUpdate) -> WeightReply:
        return await self._call("POST", "/weights", WeightReply, update)

    async def load_adapter(self, update: WeightUpdate) -> WeightReply:
        """`update.adapter` names it."""
        return await self._call("POST", "/adapters", WeightReply, update)

    async def drop_adapter(self, name: str) -> None:
        await self._call("DELETE", f"/adapters/{name}", dict[str, Any])

    async def put_tenants(self, grants: Sequence[TenantGrant]) -> list[TenantUse]:
        """Replace the tenants that the engine serves; those left out go, with their adapters and requests."""
        return await self._call("PUT", "/tenants", list[TenantUse], list(grants))

    async def tenants(self) -> list[TenantUse]:
        """List the tenants with what each uses."""
        return await self._call("GET", "/tenants", list[TenantUse])

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._call("POST", "/pause", dict[str, Any], {"mode": mode})

    async def resume(self) -> None:
        await self._call("POST", "/resume", dict[str, Any], {})

    async def abort(self, request_id: str) -> None:
        await self._call("POST", "/v1/abort", dict[str, Any], {"request_id": request_id})

    async def health(self) -> bool:
        """True while the engine serves; False as well when it can't be reached."""
        try:
            async with self._open().get(f"{self.base_url}/health", timeout=aiohttp.ClientTimeout(total=5)) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def close(self) -> None:
        if self._owns_session and self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> "InferenceClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=client_context()), timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session

    async def _call(
        self, method: str, route: str, kind: type[Body], body: object = None, extra: dict[str, str] | None = None
    ) -> Body:
        url = self.base_url + route
        data = None if body is None else _encoder.encode(body)
        headers = {**self._headers, **(extra or {})}
        if data is not None:
            headers["Content-Type"] = "application/json"
        try:
            async with self._open().request(method, url, data=data, headers=headers) as reply:
                content = await reply.read()
                binary = reply.content_type == MSGPACK
                if reply.status != 200:
                    raise _error(reply, content)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise EngineError(0, f"no reply from the engine at {url}: {reason}", retryable=True) from error
        return _decode(url, content, kind, binary=binary)


def _decode(url: str, content: bytes, kind: type[Body], *, binary: bool) -> Body:
    try:
        return msgspec.msgpack.decode(content, type=kind) if binary else msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise EngineError(200, f"{url} sent a reply that can't be read: {error}", retryable=False) from error


async def _frames(url: str, reader: aiohttp.StreamReader) -> AsyncGenerator[GenerateChunk, None]:
    try:
        while True:
            size = int.from_bytes(await reader.readexactly(4), "little")
            if size > _LARGEST_FRAME:
                raise EngineError(200, f"{url} sent a frame of {size} bytes", retryable=False)
            chunk = _decode(url, await reader.readexactly(size), GenerateChunk, binary=True)
            if chunk.error is not None:
                raise EngineError(500, f"{url}: {chunk.error.message}", retryable=True, param=chunk.error.param)
            yield chunk
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise EngineError(0, f"the reply from the engine at {url} broke off", retryable=True) from None


def _as_chunk(response: GenerateResponse) -> GenerateChunk:
    choices = [
        GenerateChunkChoice(c.index, c.token_ids, c.finish_reason, c.logprobs, c.versions, c.routed_experts)
        for c in response.choices
    ]
    return GenerateChunk(response.request_id, choices, response.model, kv_ticket=response.kv_ticket)


def _error(reply: aiohttp.ClientResponse, content: bytes) -> EngineError:
    try:
        info = msgspec.json.decode(content, type=ErrorBody).error
        message, param = info.message, info.param
    except msgspec.DecodeError:
        message, param = content[:500].decode(errors="replace") or str(reply.reason), None
    wait = reply.headers.get("Retry-After", "")
    return EngineError(
        reply.status,
        f"{reply.method} {reply.url.path}: {reply.status}: {message}",
        retryable=reply.status in _RETRYABLE_STATUS,
        param=param,
        retry_after=float(wait) if wait.isdigit() else None,
    )
