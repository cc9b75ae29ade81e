"""Read and check requests, so that nothing malformed reaches the engine."""

import asyncio
from typing import TypeVar

from aiohttp import web

from headway.core.images import MOST_REQUEST_BYTES
from headway.core.openai.requests import CONTEXT_EXCEEDED, MODEL_NOT_FOUND, RequestError, check_shape, decode
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.engine import Engine

Body = TypeVar("Body")

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 1e6
MAX_INTEGER = 2**31 - 1
MAX_STREAM_SECONDS = 60.0
MAX_BYTES_PER_TOKEN = 64
"""A body with more bytes for each token of the context holds a prompt that cannot fit: it is not even parsed."""
_OTHER_FIELDS = 2**16
"""Bytes of a body that need not belong to its prompt."""
_FLOAT32_TINY = 1.1754943508222875e-38
"""The smallest number that every device keeps apart from 0 in float32."""
READ_TIMEOUT = web.AppKey("read_timeout", float)
"""Seconds in which a body must have arrived."""


async def read_bytes(request: web.Request) -> bytes:
    """The request's body. Raises RequestError where it does not come in time, or cannot be unpacked."""
    try:
        async with asyncio.timeout(request.app[READ_TIMEOUT]):
            return await request.read()
    except TimeoutError:
        raise RequestError("the body of the request did not arrive in time", status=408) from None
    except (web.RequestPayloadError, ValueError) as error:
        raise RequestError(f"the body of the request cannot be read: {error}") from None


async def read_body(request: web.Request, kind: type[Body]) -> Body:
    """The request's body as a `kind`. Raises RequestError that names the field where there is one."""
    return decode(await read_bytes(request), kind)


async def read_prompt_body(request: web.Request, kind: type[Body], engine: Engine) -> tuple[Body, int]:
    """The body of a request for tokens as a `kind`, and its bytes. Raises RequestError on one that no context holds."""
    limit = MAX_BYTES_PER_TOKEN * engine.max_model_len + _OTHER_FIELDS
    if engine.takes_images:
        limit += MOST_REQUEST_BYTES
    if (request.content_length or 0) > limit:
        raise _too_long(request.content_length or 0, engine)
    content = await read_bytes(request)
    if len(content) > limit:
        raise _too_long(len(content), engine)
    return decode(content, kind), len(content)


def _too_long(size: int, engine: Engine) -> RequestError:
    message = f"a request of {size} bytes cannot fit into the context of {engine.max_model_len} tokens"
    return RequestError(message, code=CONTEXT_EXCEEDED)


def check_request(request: GenerateRequest, engine: Engine, known: int = 0) -> None:
    """Raises RequestError on anything the engine could not serve. The first `known` tokens were served before."""
    models = engine.models()
    if request.model not in models:
        message = f"model {request.model!r} does not exist; known: {', '.join(models)}"
        raise RequestError(message, "model", 404, MODEL_NOT_FOUND)
    tokens = request.token_ids
    if not tokens:
        raise RequestError("the prompt has no tokens", "token_ids")
    if len(tokens) >= engine.max_model_len:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens; with at least one to generate, the context of "
            f"{engine.max_model_len} is exceeded",
            "token_ids",
            code=CONTEXT_EXCEEDED,
        )
    new = tokens[known:] if known else tokens
    if new and (min(new) < 0 or max(new) >= engine.vocab_size):
        raise RequestError(f"token ids must be 0 to {engine.vocab_size - 1}", "token_ids")
    if not 0 <= request.routed_experts_start <= len(tokens):
        raise RequestError(
            f"routed_experts_start must be 0 to {len(tokens)}, the prompt's length", "routed_experts_start"
        )
    if not 1 <= request.stream_interval <= MAX_INTEGER:
        raise RequestError(f"stream_interval must be 1 to {MAX_INTEGER}", "stream_interval")
    if not 0 <= request.stream_seconds <= MAX_STREAM_SECONDS:
        raise RequestError(f"stream_seconds must be 0 to {MAX_STREAM_SECONDS:g}", "stream_seconds")
    if not 0 <= request.begun < len(tokens):
        raise RequestError("begun must be 0 or more, and leave a token to the prompt", "begun")
    if request.images and not engine.takes_images:
        raise RequestError(f"the request holds images, but {engine.no_images}", "images")
    if not -(2**31) <= request.priority < 2**31:
        raise RequestError("priority must fit into 32 bits", "priority")
    check_sampling(request.sampling_params, engine.vocab_size)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError on numbers out of range, or that engines could not hold (32-bit integers, float32)."""
    _require(0 <= params.temperature <= MAX_TEMPERATURE, "temperature", f"must be 0 to {MAX_TEMPERATURE:g}")
    _require(_FLOAT32_TINY <= params.top_p <= 1, "top_p", "must be above 0 (1.2e-38 or more) and at most 1")
    _require(-1 <= params.top_k <= MAX_INTEGER, "top_k", "must be positive (below 2**31), or 0 or -1 for no limit")
    _require(0 <= params.min_p <= 1, "min_p", "must be 0 to 1")
    limit = params.max_tokens
    _require(limit is None or 1 <= limit <= MAX_INTEGER, "max_tokens", "must be 1 or more, and below 2**31")
    _require(params.seed is None or -(2**63) <= params.seed < 2**64, "seed", "must fit into 64 bits")
    _require(1 <= params.n <= MAX_CHOICES, "n", f"must be 1 to {MAX_CHOICES}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        _require(value is None or 0 <= value <= MAX_LOGPROBS, name, f"must be 0 to {MAX_LOGPROBS}")
    valid = all(0 <= token < vocab_size for token in params.stop_token_ids)
    _require(valid, "stop_token_ids", f"must be 0 to {vocab_size - 1}")
    if params.shaped:
        check_shape(params, vocab_size)
        endless = params.response_format is not None and params.ignore_eos
        _require(not endless, "ignore_eos", "must be false with a response_format, whose end is the reply's")


def _require(holds: bool, param: str, rule: str) -> None:
    if not holds:
        raise RequestError(f"{param} {rule}", param)
