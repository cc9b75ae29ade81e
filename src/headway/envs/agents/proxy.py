"""OpenAI's and Anthropic's APIs on loopback, for agents that know nothing of training: their calls become an episode's
tokens.

Each episode has a base URL of its own, whose path is a secret. What is asked there is answered by the episode's
policy, token for token as the engine sampled it. How tokens are drawn stays the run's decision, except for the shape
of a reply that the agent asks for: penalties, biases and formats.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
from aiohttp import web

from headway.core.episodes import Trace
from headway.core.messages import Message, ToolCall
from headway.core.openai.answers import Completion, model_card, new_id
from headway.core.openai.requests import CONTEXT_EXCEEDED, RequestError
from headway.envs.agents.apis.anthropic import MessagesCall
from headway.envs.agents.apis.call import Call, Kept
from headway.envs.agents.apis.chat import ChatCall
from headway.envs.agents.apis.responses import ResponsesCall
from headway.envs.policy import ContextLimit, EpisodeFailure, Policy, ShapeRefused

CALLS: dict[str, type[Call]] = {"chat/completions": ChatCall, "responses": ResponsesCall, "messages": MessagesCall}
"""The APIs by their routes."""
MAX_BODY = 64 * 2**20


@dataclass
class Endpoint:
    """The APIs of one episode's agent. `failure` is why a call went unanswered, if one did."""

    root_url: str
    port: int
    api_key: str
    speaker: Callable[[str], Policy]
    calls: int = 0
    failure: EpisodeFailure | None = None
    running: set["asyncio.Task[object]"] = field(default_factory=set)
    kept: Kept = field(default_factory=Kept)
    said: dict[str, ToolCall] = field(default_factory=dict)
    """The policy's calls of tools by their ids."""
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tokens up to and with a reply, by the id of its trace and its node."""

    @property
    def base_url(self) -> str:
        """The address as OpenAI's clients want it; Anthropic's want `root_url`."""
        return f"{self.root_url}/v1"

    def variables(self) -> dict[str, str]:
        """The variables by which packages of both vendors find this endpoint."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.root_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    def recall(self, message: Message) -> Message:
        """`message` with the policy's calls as it wrote them: agents that parse arguments write them back with other
        spaces, which would be other tokens."""
        if not message.tool_calls:
            return message
        return msgspec.structs.replace(message, tool_calls=tuple(map(self._recall, message.tool_calls)))

    def _recall(self, call: ToolCall) -> ToolCall:
        said = self.said.get(call.id)
        if said is None or said.name != call.name:
            return call
        return said if _same_json(said.arguments, call.arguments) else call

    def completion(self, trace: Trace, message: Message, model: str) -> Completion:
        """`message` with the token counts and the end that the trace recorded for it."""
        at = next(i for i in reversed(range(len(trace.nodes))) if trace.nodes[i].message is message)
        node = trace.nodes[at]
        before, parent = 0, node.parent
        while parent >= 0:
            if (known := self.lengths.get((id(trace), parent))) is not None:
                before += known
                break
            before += len(trace.nodes[parent].token_ids)
            parent = trace.nodes[parent].parent
        self.lengths[id(trace), at] = before + len(node.token_ids)
        return Completion(message, node.finish_reason or "stop", before, len(node.token_ids), model)

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
        endpoint = Endpoint(f"http://127.0.0.1:{self._port}/{key}", self._port, key, speaker)
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
            for route, kind in CALLS.items():
                app.router.add_post(f"/{{key}}/v1/{route}", partial(self._call, kind))
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

    async def _call(self, kind: type[Call], request: web.Request) -> web.StreamResponse:
        endpoint = self._endpoints.get(request.match_info["key"])
        if endpoint is None:
            return _no_episode(kind)
        task = asyncio.current_task()
        assert task is not None
        endpoint.running.add(task)
        try:
            return await self._answer(endpoint, kind, request)
        finally:
            endpoint.running.discard(task)

    async def _answer(self, endpoint: Endpoint, kind: type[Call], request: web.Request) -> web.StreamResponse:
        try:
            call = kind.read(await request.read(), endpoint.kept)
            call.chat.check()
            messages, tools = call.conversation(endpoint.recall), call.chat.offered_tools()
        except RequestError as error:
            return _error(kind, error.status, str(error), error.code, error.param)
        policy = endpoint.speaker(request.headers.get("X-Session-ID", ""))
        endpoint.calls += 1
        try:
            shape = call.chat.shape()
            message = await policy.chat(
                messages, tools, max_tokens=call.chat.token_limit, shape=shape if shape.shaped else None
            )
        except ShapeRefused as failure:
            return _error(kind, 400, failure.message, param=failure.param)
        except ContextLimit as failure:
            endpoint.failure = failure
            policy.trace.truncated = True
            return _error(kind, 400, failure.message, CONTEXT_EXCEEDED)
        except EpisodeFailure as failure:
            endpoint.failure = failure
            return _error(kind, 503, failure.message)
        endpoint.said |= {said.id: said for said in message.tool_calls}
        completion = endpoint.completion(policy.trace, message, call.chat.model)
        if not call.chat.stream:
            return web.json_response(call.body(completion))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in call.events(completion):
            await response.write(event)
        await response.write_eof()
        return response


async def _name_response(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = response.headers["request-id"] = new_id("req")


def _no_episode(kind: type[Call] = ChatCall) -> web.Response:
    return _error(kind, 404, "there is no such episode, or it is over")


def _error(
    kind: type[Call], status: int, message: str, code: str | None = None, param: str | None = None
) -> web.Response:
    return web.json_response(kind.error(status, message, code, param), status=status)


def _same_json(first: str, second: str) -> bool:
    if first == second:
        return True
    try:
        return bool(msgspec.json.decode(first) == msgspec.json.decode(second))
    except (msgspec.DecodeError, UnicodeEncodeError):
        return False
