"""OpenAI's chat API on loopback, for agents that know nothing of training: their calls become an episode's tokens.

Each episode has a base URL of its own, whose path is a secret. What is asked there is answered by the episode's
policy, token for token as the engine sampled it; how tokens are drawn stays the run's decision.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from headway.core.episodes import Trace
from headway.core.messages import Message
from headway.core.openai import (
    CONTEXT_EXCEEDED,
    ChatRequest,
    Completion,
    RequestError,
    decode,
    error_body,
    model_card,
    new_id,
)
from headway.envs.policy import ContextLimit, EpisodeFailure, Policy

MAX_BODY = 64 * 2**20


@dataclass
class Endpoint:
    """The chat API of one episode's agent. `failure` is why a call went unanswered, if one did."""

    base_url: str
    port: int
    api_key: str
    speaker: Callable[[str], Policy]
    calls: int = 0
    failure: EpisodeFailure | None = None
    running: set["asyncio.Task[object]"] = field(default_factory=set)

    def check(self) -> None:
        """Raise what kept the model from answering: an agent that went on regardless proves nothing."""
        if self.failure is not None and not isinstance(self.failure, ContextLimit):
            raise self.failure


class Proxy:
    """One server for all episodes of a worker, started at the first of them."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Endpoint] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def endpoint(self, speaker: Callable[[str], Policy]) -> AsyncIterator[Endpoint]:
        """An endpoint for one episode. `speaker` says who answers, given the caller's X-Session-ID ("" for none).

        When the block ends, calls still in flight are cancelled and later ones refused.
        """
        await self._start()
        key = secrets.token_urlsafe(24)
        endpoint = Endpoint(f"http://127.0.0.1:{self._port}/{key}/v1", self._port, key, speaker)
        self._endpoints[key] = endpoint
        try:
            yield endpoint
        finally:
            del self._endpoints[key]
            for call in endpoint.running:
                call.cancel()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _start(self) -> None:
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=MAX_BODY)
            app.router.add_post("/{key}/v1/chat/completions", self._chat)
            app.router.add_get("/{key}/v1/models", self._models)
            app.router.add_get("/{key}/v1/models/{name}", self._model)
            app.on_response_prepare.append(_name_response)
            # A caller that goes away, as killed agents do, must not leave its reply being sampled.
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._port = runner.addresses[0][1]
            self._runner = runner

    async def _models(self, request: web.Request) -> web.Response:
        if request.match_info["key"] not in self._endpoints:
            return _no_episode()
        return web.json_response({"object": "list", "data": [model_card("policy")]})

    async def _model(self, request: web.Request) -> web.Response:
        """Whatever name an agent has for its model, the policy answers to it."""
        if request.match_info["key"] not in self._endpoints:
            return _no_episode()
        return web.json_response(model_card(request.match_info["name"]))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        endpoint = self._endpoints.get(request.match_info["key"])
        if endpoint is None:
            return _no_episode()
        task = asyncio.current_task()
        assert task is not None
        endpoint.running.add(task)
        try:
            return await self._answer(endpoint, request)
        finally:
            endpoint.running.discard(task)

    async def _answer(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        try:
            asked = decode(await request.read(), ChatRequest)
            asked.check()
            if asked.n not in (None, 1):
                raise RequestError("n must be 1: an episode has one reply per call", "n")
            if asked.logprobs:
                raise RequestError("logprobs are not sent to agents: leave it out", "logprobs")
            messages, tools = asked.conversation(), asked.offered_tools()
        except RequestError as error:
            return _error(400, str(error), "invalid_request_error", param=error.param)
        policy = endpoint.speaker(request.headers.get("X-Session-ID", ""))
        endpoint.calls += 1
        try:
            message = await policy.chat(messages, tools, max_tokens=asked.token_limit)
        except ContextLimit as failure:
            endpoint.failure = failure
            policy.trace.truncated = True
            return _error(400, failure.message, "invalid_request_error", CONTEXT_EXCEEDED)
        except EpisodeFailure as failure:
            endpoint.failure = failure
            return _error(503, failure.message, "server_error")
        completion = _completion(policy.trace, message, asked.model)
        if not asked.stream:
            return web.json_response(completion.body())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in completion.events(with_usage=asked.wants_usage):
            await response.write(event)
        await response.write_eof()
        return response


def _completion(trace: Trace, message: Message, model: str) -> Completion:
    """`message` with the token counts and the end that the trace recorded for it."""
    at = next(i for i in reversed(range(len(trace.nodes))) if trace.nodes[i].message is message)
    node = trace.nodes[at]
    before, parent = 0, node.parent
    while parent >= 0:
        before += len(trace.nodes[parent].token_ids)
        parent = trace.nodes[parent].parent
    return Completion(message, node.finish_reason or "stop", before, len(node.token_ids), model)


async def _name_response(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = new_id("req")


def _no_episode() -> web.Response:
    return _error(404, "there is no such episode, or it is over", "not_found_error")


def _error(status: int, message: str, kind: str, code: str | None = None, param: str | None = None) -> web.Response:
    return web.json_response(error_body(message, kind, param, code=code), status=status)
