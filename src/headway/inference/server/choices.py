"""Answers of OpenAI's two routes: a list of choices, whole or as a stream."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiohttp import web

from headway.core.openai.answers import envelope, usage
from headway.core.openai.requests import ChatRequest, CompletionRequest, Json
from headway.core.protocol import GenerateRequest
from headway.inference.engine import Engine
from headway.inference.outputs import Choice, Chunk, Result
from headway.inference.server.context import ServerContext, context_of
from headway.inference.server.responses import EventStream, json_response
from headway.inference.server.stops import StopStrings
from headway.inference.server.text import Text
from headway.rendering.base import Renderer


class ChoiceWriter(ABC):
    """Write one choice of a reply as JSON. `done` once its last delta was written; `tokens` counts those so far.

    `stops` is shared by all choices.
    """

    def __init__(
        self, index: int, body: ChatRequest | CompletionRequest, context: ServerContext, stops: StopStrings | None
    ) -> None:
        self.index = index
        self.done = False
        self.tokens = 0
        self.body, self.context = body, context
        self.text = Text(context.renderer, frozenset(context.renderer.stop_token_ids), stops)

    @abstractmethod
    def complete(self, choice: Choice) -> Json:
        """The content and the finish reason of a whole choice."""

    @abstractmethod
    def extend(self, chunk: Chunk, shown: str, finish_reason: str | None) -> Json | None:
        """The delta that `chunk` makes, `shown` being its text; None while there is nothing to send."""

    @abstractmethod
    def logprobs(self, part: Choice | Chunk) -> Json:
        """The logprobs of the tokens in `part`."""

    def whole(self, choice: Choice) -> Json:
        out = {"index": self.index, "logprobs": None, **self.complete(choice)}
        if self.body.wants_logprobs:
            out["logprobs"] = self.logprobs(choice)
        if self.body.return_token_ids:
            out |= {"token_ids": choice.token_ids, "versions": choice.versions}
        return out

    def delta(self, chunk: Chunk) -> Json | None:
        if self.done:
            return None
        self.tokens += len(chunk.token_ids)
        shown = self.text.take(chunk.token_ids, last=chunk.finish_reason is not None)
        finish_reason = "stop" if self.text.stopped else chunk.finish_reason
        self.done = finish_reason is not None
        out = self.extend(chunk, shown, finish_reason)
        if out is None:
            return None
        if self.body.wants_logprobs:
            out["logprobs"] = self.logprobs(chunk)
        if self.body.return_token_ids:
            out["token_ids"] = chunk.token_ids
        return {"index": self.index, **out}


async def answer(
    http: web.Request, kind: str, request: GenerateRequest, writers: Sequence[ChoiceWriter]
) -> web.StreamResponse:
    """Generate, and answer with an object of `kind`, or with a stream of them."""
    context, body = context_of(http), writers[0].body
    prompt = len(request.token_ids)
    if body.stream:
        return await _stream(http, kind, request, writers)
    result = await generate_until(context.engine, context.renderer, request, writers[0].text.stops)
    output = sum(len(choice.token_ids) for choice in result.choices)
    response = _envelope(kind, request, writers)
    response["choices"] = [writers[choice.index].whole(choice) for choice in result.choices]
    response["usage"] = usage(prompt, output, result.cached_tokens)
    if body.return_token_ids:
        response["prompt_token_ids"] = request.token_ids
    return json_response(response)


async def _stream(
    http: web.Request, kind: str, request: GenerateRequest, writers: Sequence[ChoiceWriter]
) -> web.StreamResponse:
    kind = "chat.completion.chunk" if kind == "chat.completion" else kind
    async with EventStream(http) as events:
        chunks = context_of(http).engine.stream(request)
        try:
            async for chunk in chunks:
                choice = writers[chunk.index].delta(chunk)
                if choice is not None:
                    await events.send(_envelope(kind, request, writers) | {"choices": [choice]})
                if all(writer.done for writer in writers):
                    break
        finally:
            await close_stream(chunks)
        if writers[0].body.wants_usage:
            counts = usage(len(request.token_ids), sum(writer.tokens for writer in writers), 0)
            await events.send(_envelope(kind, request, writers) | {"choices": [], "usage": counts})
    return events.response


def _envelope(kind: str, request: GenerateRequest, writers: Sequence[ChoiceWriter]) -> dict[str, Any]:
    """The fields that all objects of an answer begin with; the model has the name by which the client asked for it."""
    return envelope(kind, request.request_id or "", writers[0].body.model)


def stop_strings(body: ChatRequest | CompletionRequest) -> StopStrings | None:
    stops = body.stops()
    return StopStrings(stops) if stops else None


async def generate_until(
    engine: Engine, renderer: Renderer, request: GenerateRequest, stops: StopStrings | None
) -> Result:
    """Generate all choices. With stop strings, each ends with the token that completed one, and the engine is told to
    stop once all have."""
    if stops is None:
        return await engine.generate(request)
    count = request.sampling_params.n
    texts = [Text(renderer, frozenset(renderer.stop_token_ids), stops) for _ in range(count)]
    choices = [Choice(i, [], [], [], [], "length") for i in range(count)]
    unfinished = set(range(count))
    chunks = engine.stream(request)
    async for chunk in chunks:
        # Chunks that wait already come without a pause, which others need.
        await asyncio.sleep(0)
        if chunk.index in unfinished:
            choice, text = choices[chunk.index], texts[chunk.index]
            choice.extend(chunk)
            text.take(chunk.token_ids, last=chunk.finish_reason is not None)
            if text.stopped:
                choice.finish_reason = "stop"
            if text.stopped or chunk.finish_reason is not None:
                unfinished.discard(chunk.index)
        if not unfinished:
            break
    await close_stream(chunks)
    return Result(request.request_id or "", choices)


async def close_stream(chunks: AsyncIterator[Chunk]) -> None:
    """End a stream that may not be exhausted, so that the engine stops working on it."""
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()
