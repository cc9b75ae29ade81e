"""POST /inference/v1/generate: tokens in, tokens out."""

import base64
from collections.abc import Sequence

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from headway.core.openai import new_id
from headway.core.protocol import (
    GenerateChoice,
    GenerateChunk,
    GenerateChunkChoice,
    GenerateRequest,
    GenerateResponse,
    Logprobs,
    RoutedExpertsBody,
    TokenLogprob,
    Usage,
)
from headway.inference.engine import Choice, Result, TopLogprobs
from headway.inference.server.context import context_of
from headway.inference.server.requests import check_request, read_body
from headway.inference.server.responses import EventStream, json_response


async def generate(http: web.Request) -> web.StreamResponse:
    engine = context_of(http).engine
    request = await read_body(http, GenerateRequest)
    request.model = context_of(http).policy_name(request.model)
    request.request_id = request.request_id or new_id("gen")
    check_request(request, engine)
    if request.stream:
        return await _stream(http, request)
    return json_response(_response(request, await engine.generate(request)))


async def _stream(http: web.Request, request: GenerateRequest) -> web.StreamResponse:
    wants = request.sampling_params.logprobs is not None
    async with EventStream(http) as events:
        async for chunk in context_of(http).engine.stream(request):
            logprobs = _logprobs(chunk.token_ids, chunk.logprobs, chunk.top_logprobs) if wants else None
            choice = GenerateChunkChoice(
                chunk.index,
                chunk.token_ids,
                chunk.finish_reason,
                logprobs,
                chunk.versions if chunk.finish_reason else [],
            )
            await events.send(GenerateChunk(request.request_id or "", [choice], request.model))
    return events.response


def _response(request: GenerateRequest, result: Result) -> GenerateResponse:
    prompt, output = len(request.token_ids), sum(len(c.token_ids) for c in result.choices)
    wants = request.sampling_params.logprobs is not None
    scores = result.prompt_logprobs
    return GenerateResponse(
        request_id=result.request_id,
        choices=[_choice(choice, wants) for choice in result.choices],
        usage=Usage(prompt, output, prompt + output, result.cached_tokens),
        model=request.model,
        prompt_token_ids=request.token_ids,
        prompt_logprobs=None if scores is None else [_prompt_logprob(score) for score in scores],
    )


def _choice(choice: Choice, wants_logprobs: bool) -> GenerateChoice:
    logprobs = _logprobs(choice.token_ids, choice.logprobs, choice.top_logprobs) if wants_logprobs else None
    experts = None if choice.experts is None else experts_body(choice.experts)
    return GenerateChoice(choice.index, choice.token_ids, choice.finish_reason, logprobs, choice.versions, experts)


def experts_body(experts: NDArray[np.integer]) -> RoutedExpertsBody:
    tokens, layers, k = experts.shape
    data = base64.b64encode(np.ascontiguousarray(experts).tobytes()).decode()
    return RoutedExpertsBody(data, (tokens, layers, k), 0, experts.dtype.name)


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
