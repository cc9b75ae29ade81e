"""POST /inference/v1/generate: tokens in, tokens out."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from headway.core.openai.answers import new_id
from headway.core.protocol import (
    FRAMES,
    MSGPACK,
    GenerateChoice,
    GenerateChunk,
    GenerateChunkChoice,
    GenerateRequest,
    GenerateResponse,
    Logprobs,
    RoutedExperts,
    TokenLogprob,
    Usage,
)
from headway.inference.errors import LeavingError
from headway.inference.outputs import Choice, Result, TopLogprobs
from headway.inference.server.context import ServerContext, context_of
from headway.inference.server.handover import cut_short, ending_of, hands_over, take_over, ticket_for
from headway.inference.server.requests import check_request, read_prompt_body
from headway.inference.server.responses import EventStream, FrameStream, json_response

_MANY_EXPERT_BYTES = 1 << 20
"""Routed experts of more bytes are packed in a thread, so that other requests go on meanwhile."""


async def generate(http: web.Request) -> web.StreamResponse:
    engine = context_of(http).engine
    request, _ = await read_prompt_body(http, GenerateRequest, engine)
    request.model = context_of(http).policy_name(request.model)
    request.request_id = request.request_id or new_id("gen")
    context = context_of(http)
    check_request(request, engine, context.conversations.resume(request))
    if context.leaving:
        raise LeavingError("the server is stopping; send the request to another one")
    request = await take_over(context, request, engine)
    if handed_over := hands_over(context, request, engine):
        request = cut_short(request, engine)
    with in_flight(context, request):
        if request.stream:
            return await _stream(http, request, handed_over)
        result = await engine.generate(request)
    for choice in result.choices:
        choice.finish_reason = ending_of(context, choice.finish_reason, handed_over=handed_over)
    reason = result.choices[0].finish_reason
    result.kv_ticket = ticket_for(context, reason, result.kv_transfer, handed_over=handed_over)
    if MSGPACK not in http.headers.get("Accept", ""):
        return json_response(_response(request, result, packed=False))
    sizes = [0 if choice.experts is None else choice.experts.nbytes for choice in result.choices]
    if sum(sizes) < _MANY_EXPERT_BYTES:
        return _binary_response(request, result)
    return await asyncio.to_thread(_binary_response, request, result)


@contextmanager
def in_flight(context: ServerContext, request: GenerateRequest) -> Iterator[None]:
    """Keep a request that may migrate among those that are handed over when the server leaves."""
    request_id = request.request_id or ""
    # A second request under an id that is taken is refused, and must not take the first one with it.
    added = request.may_migrate and request_id not in context.generating
    if added:
        context.generating.add(request_id)
    try:
        yield
    finally:
        if added:
            context.generating.discard(request_id)


def _binary_response(request: GenerateRequest, result: Result) -> web.Response:
    """Routed experts packed, and without what the client sent: the bytes grow with the new tokens only."""
    response = _response(request, result, packed=True)
    response.prompt_token_ids = []
    return web.Response(body=msgspec.msgpack.encode(response), content_type=MSGPACK)


async def _stream(http: web.Request, request: GenerateRequest, handed_over: bool) -> web.StreamResponse:
    wants = request.sampling_params.logprobs is not None
    context, binary = context_of(http), FRAMES in http.headers.get("Accept", "")
    numbers = wants and binary and not request.sampling_params.logprobs
    reply: list[int] = []
    async with FrameStream(http) if binary else EventStream(http) as events:
        async for chunk in context.engine.stream(request):
            words = wants and not numbers
            logprobs = _logprobs(chunk.token_ids, chunk.logprobs, chunk.top_logprobs) if words else None
            reason = chunk.finish_reason and ending_of(context, chunk.finish_reason, handed_over=handed_over)
            choice = GenerateChunkChoice(
                chunk.index,
                chunk.token_ids,
                reason,
                logprobs,
                chunk.versions if binary or chunk.finish_reason else [],
            )
            if numbers:
                choice.token_logprobs = chunk.logprobs
            if chunk.experts is not None:
                choice.routed_experts = _experts(chunk.experts, request, packed=True)
            ticket = ticket_for(context, reason, chunk.kv_transfer, handed_over=handed_over)
            part = GenerateChunk(request.request_id or "", [choice], request.model, kv_ticket=ticket)
            reply += chunk.token_ids
            if binary and reason in ("stop", "length") and request.sampling_params.n == 1:
                part.kept = context.conversations.keep(request, reply, context.engine.state().kv_capacity_tokens)
            await events.send(part)
    return events.response


def _response(request: GenerateRequest, result: Result, *, packed: bool) -> GenerateResponse:
    prompt, output = len(request.token_ids), sum(len(c.token_ids) for c in result.choices)
    wants = request.sampling_params.logprobs is not None
    scores = result.prompt_logprobs
    return GenerateResponse(
        request_id=result.request_id,
        choices=[_choice(choice, request, wants, packed) for choice in result.choices],
        usage=Usage(prompt, output, prompt + output, result.cached_tokens),
        model=request.model,
        prompt_token_ids=request.token_ids,
        prompt_logprobs=None if scores is None else [_prompt_logprob(score) for score in scores],
        kv_ticket=result.kv_ticket,
    )


def _choice(choice: Choice, request: GenerateRequest, wants_logprobs: bool, packed: bool) -> GenerateChoice:
    logprobs = _logprobs(choice.token_ids, choice.logprobs, choice.top_logprobs) if wants_logprobs else None
    experts = None if choice.experts is None else _experts(choice.experts, request, packed=packed)
    return GenerateChoice(choice.index, choice.token_ids, choice.finish_reason, logprobs, choice.versions, experts)


def _experts(experts: NDArray[np.integer], request: GenerateRequest, *, packed: bool) -> RoutedExperts:
    return RoutedExperts.of(experts, request.routed_experts_start, packed=packed)


def _logprobs(token_ids: Sequence[int], values: Sequence[float], top: Sequence[TopLogprobs]) -> Logprobs:
    if not top:
        pairs = zip(token_ids, values, strict=True)
        return Logprobs([TokenLogprob(f"token_id:{token}", token, value) for token, value in pairs])
    rows = zip(token_ids, values, top, strict=True)
    return Logprobs([_token_logprob(token, value, others) for token, value, others in rows])


def _token_logprob(token: int, value: float, others: TopLogprobs) -> TokenLogprob:
    alternatives = [TokenLogprob(f"token_id:{other}", other, logprob) for other, logprob in others]
    return TokenLogprob(f"token_id:{token}", token, value, alternatives)


def _prompt_logprob(score: TopLogprobs | None) -> TokenLogprob | None:
    if score is None:
        return None
    (token, value), *others = score
    return _token_logprob(token, value, others)
