"""Read and check requests, so that nothing malformed reaches the engine."""

import math
from typing import TypeVar

from aiohttp import web

from headway.core.openai import RequestError, decode
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.engine import Engine

Body = TypeVar("Body")

MAX_CHOICES = 128
MAX_LOGPROBS = 20


async def read_body(request: web.Request, kind: type[Body]) -> Body:
    """The request's body as a `kind`. Raises RequestError that names the field where there is one."""
    return decode(await request.read(), kind)


def check_request(request: GenerateRequest, engine: Engine) -> None:
    """Raises RequestError on anything the engine could not serve."""
    models = engine.models()
    if request.model not in models:
        raise RequestError(f"model {request.model!r} does not exist; known: {', '.join(models)}", "model", 404)
    tokens = request.token_ids
    if not tokens:
        raise RequestError("the prompt has no tokens", "token_ids")
    if min(tokens) < 0 or max(tokens) >= engine.vocab_size:
        raise RequestError(f"token ids must be 0 to {engine.vocab_size - 1}", "token_ids")
    if len(tokens) >= engine.max_model_len:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens; with at least one to generate, the context of "
            f"{engine.max_model_len} is exceeded",
            "token_ids",
        )
    if not -(2**31) <= request.priority < 2**31:
        raise RequestError("priority must fit into 32 bits", "priority")
    check_sampling(request.sampling_params, engine.vocab_size)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    _require(params.temperature >= 0 and math.isfinite(params.temperature), "temperature", "must be 0 or more")
    _require(0 < params.top_p <= 1, "top_p", "must be above 0 and at most 1")
    _require(params.top_k >= -1, "top_k", "must be positive, or 0 or -1 for no limit")
    _require(0 <= params.min_p <= 1, "min_p", "must be 0 to 1")
    _require(params.max_tokens is None or params.max_tokens >= 1, "max_tokens", "must be 1 or more")
    _require(1 <= params.n <= MAX_CHOICES, "n", f"must be 1 to {MAX_CHOICES}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        _require(value is None or 0 <= value <= MAX_LOGPROBS, name, f"must be 0 to {MAX_LOGPROBS}")
    valid = all(0 <= token < vocab_size for token in params.stop_token_ids)
    _require(valid, "stop_token_ids", f"must be 0 to {vocab_size - 1}")


def _require(holds: bool, param: str, rule: str) -> None:
    if not holds:
        raise RequestError(f"{param} {rule}", param)
