"""POST /v1/completions: text or token ids in, text out."""

import time
from typing import Any

from aiohttp import web

from headway.core.protocol import GenerateRequest
from headway.inference.engine import Choice, Chunk, RequestError, TopLogprobs
from headway.inference.server.checks import check_request, read_body
from headway.inference.server.context import ServerContext, context_of, new_id
from headway.inference.server.errors import json_response
from headway.inference.server.events import EventStream
from headway.inference.server.openai import SamplingFields, Text, close_stream, generate_until, usage


class CompletionRequest(SamplingFields, kw_only=True):
    """One prompt per request: text, or its token ids."""

    prompt: str | list[int]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False


async def completions(http: web.Request) -> web.StreamResponse:
    context = context_of(http)
    body = await read_body(http, CompletionRequest)
    request = _request(body, context)
    check_request(request, context.engine)
    if body.stream:
        return await _stream(http, body, request)
    result = await generate_until(context.engine, context.renderer, request, body.stops())
    response = _envelope(request)
    response["choices"] = [_choice(body, choice, context) for choice in result.choices]
    output = sum(len(choice.token_ids) for choice in result.choices)
    response["usage"] = usage(len(request.token_ids), output, result.cached_tokens)
    if body.return_token_ids:
        response["prompt_token_ids"] = request.token_ids
    return json_response(response)


def _request(body: CompletionRequest, context: ServerContext) -> GenerateRequest:
    if body.echo:
        raise RequestError("echo is not supported", "echo")
    prompt = context.renderer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    return GenerateRequest(
        prompt,
        model=context.policy_name(body.model),
        sampling_params=body.sampling(max_tokens=body.max_tokens, logprobs=body.logprobs, stop_ids=[]),
        cache_salt=body.cache_salt,
        priority=body.priority,
        request_id=new_id("cmpl"),
        stream=body.stream or bool(body.stops()),
    )


def _choice(body: CompletionRequest, choice: Choice, context: ServerContext) -> dict[str, Any]:
    text = _text(body, context)
    text.take(choice.token_ids, last=True)
    out: dict[str, Any] = {"index": choice.index, "text": text.text, "finish_reason": choice.finish_reason}
    out["logprobs"] = None
    if body.logprobs is not None:
        out["logprobs"] = _logprobs(choice.token_ids, choice.logprobs, choice.top_logprobs, context)
    if body.return_token_ids:
        out["token_ids"] = choice.token_ids
        out["versions"] = choice.versions
    return out


def _text(body: CompletionRequest, context: ServerContext) -> Text:
    return Text(context.renderer, frozenset(context.renderer.stop_token_ids), body.stops())


def _logprobs(
    token_ids: list[int], logprobs: list[float], top: list[TopLogprobs], context: ServerContext
) -> dict[str, Any]:
    texts = [context.renderer.decode([token]) for token in token_ids]
    offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
    tops = [{context.renderer.decode([token]): value for token, value in row} for row in top]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops or None, "text_offset": offsets}


def _envelope(request: GenerateRequest) -> dict[str, Any]:
    return {"id": request.request_id, "object": "text_completion", "created": int(time.time()), "model": request.model}


async def _stream(http: web.Request, body: CompletionRequest, request: GenerateRequest) -> web.StreamResponse:
    context = context_of(http)
    texts = [_text(body, context) for _ in range(request.sampling_params.n)]
    open_choices = set(range(len(texts)))
    output = 0
    async with EventStream(http) as events:
        chunks = context.engine.stream(request)
        try:
            async for chunk in chunks:
                if chunk.index not in open_choices:
                    continue
                output += len(chunk.token_ids)
                choice = _delta(body, chunk, texts[chunk.index], context)
                await events.send(_envelope(request) | {"choices": [choice]})
                if choice["finish_reason"] is not None:
                    open_choices.discard(chunk.index)
                if not open_choices:
                    break
        finally:
            await close_stream(chunks)
        if body.wants_usage:
            await events.send(_envelope(request) | {"choices": [], "usage": usage(len(request.token_ids), output)})
    return events.response


def _delta(body: CompletionRequest, chunk: Chunk, text: Text, context: ServerContext) -> dict[str, Any]:
    shown = text.take(chunk.token_ids, last=chunk.finish_reason is not None)
    reason = "stop" if text.stopped else chunk.finish_reason
    out: dict[str, Any] = {"index": chunk.index, "text": shown, "finish_reason": reason, "logprobs": None}
    if body.logprobs is not None:
        out["logprobs"] = _logprobs(chunk.token_ids, chunk.logprobs, chunk.top_logprobs, context)
    if body.return_token_ids:
        out["token_ids"] = chunk.token_ids
    return out
