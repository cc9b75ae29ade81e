"""Routes for those who run the engine: weights, adapters, pause, state, health, metrics."""

from typing import Literal

import msgspec
from aiohttp import web

from headway.core.openai.requests import RequestError
from headway.core.protocol import EngineState, WeightUpdate
from headway.inference.server.context import KEY, VIEW, context_of
from headway.inference.server.requests import read_body
from headway.inference.server.responses import Handler, json_response
from headway.inference.server.tenants import bearer, is_admin, tenant_metrics

_METRICS = (
    ("running", "gauge", "Sequences in the batch"),
    ("waiting", "gauge", "Requests in line"),
    ("kv_usage", "gauge", "Share of the KV cache in use"),
    ("kv_capacity_tokens", "gauge", "Tokens the KV cache holds"),
    ("preemptions", "counter", "Sequences that gave up their blocks"),
    ("tokens_per_second", "gauge", "Tokens sampled per second, lately"),
    ("generated_tokens", "counter", "Tokens sampled since the start"),
    ("version", "gauge", "Policy version that is served"),
)


class PauseRequest(msgspec.Struct):
    mode: Literal["keep", "wait", "abort"] = "keep"


class AbortRequest(msgspec.Struct):
    request_id: str


def require_token(handler: Handler) -> Handler:
    """Let only callers with the run's bearer token through to `handler`, and tenants, whose routes were checked."""

    async def checked(request: web.Request) -> web.StreamResponse:
        context = request.app[KEY]
        if context.token is None:
            raise RequestError("admin routes are closed: the server was started without HEADWAY_TOKEN", status=401)
        if VIEW not in request and not is_admin(context, bearer(request)):
            raise RequestError("this route requires the run's bearer token", status=401)
        return await handler(request)

    return checked


async def health(request: web.Request) -> web.Response:
    problem = context_of(request).problem
    if problem is None:
        return json_response({"status": "ok"})
    return json_response({"status": "unavailable", "reason": problem}, status=503)


async def state(request: web.Request) -> web.Response:
    engine = context_of(request).engine
    current = engine.state()
    current.role = context_of(request).role
    if request.query.get("prefixes") == "1":
        current.prefixes = engine.prefixes()
    return json_response(current)


async def metrics(request: web.Request) -> web.Response:
    """The engine's state as Prometheus text."""
    current: EngineState = context_of(request).engine.state()
    lines = []
    for name, kind, text in _METRICS:
        full = f"headway_{name}_total" if kind == "counter" else f"headway_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {getattr(current, name)}"]
    lines += tenant_metrics(context_of(request))
    return web.Response(text="\n".join(lines) + "\n")


async def get_weights(request: web.Request) -> web.Response:
    return json_response(context_of(request).engine.weights())


async def post_weights(request: web.Request) -> web.Response:
    update = await read_body(request, WeightUpdate)
    return json_response(await context_of(request).engine.update(_checked(update)))


async def post_adapter(request: web.Request) -> web.Response:
    update = await read_body(request, WeightUpdate)
    if not update.adapter:
        raise RequestError("name the adapter", "adapter")
    return json_response(await context_of(request).engine.update(_checked(update)))


async def delete_adapter(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if not await context_of(request).engine.drop_adapter(name):
        raise RequestError(f"there is no adapter {name!r}", "name", 404)
    return json_response({"dropped": name})


async def pause(request: web.Request) -> web.Response:
    body = await read_body(request, PauseRequest)
    await context_of(request).engine.pause(body.mode)
    return json_response({"paused": True})


async def resume(request: web.Request) -> web.Response:
    await context_of(request).engine.resume()
    return json_response({"paused": False})


async def abort(request: web.Request) -> web.Response:
    body = await read_body(request, AbortRequest)
    if not context_of(request).engine.abort(body.request_id):
        raise RequestError(f"no request {body.request_id!r} is in flight", "request_id", 404)
    return json_response({"aborted": body.request_id})


def _checked(update: WeightUpdate) -> WeightUpdate:
    if update.version < 0:
        raise RequestError("version must be 0 or more", "version")
    if not isinstance(update.transport.get("type"), str):
        raise RequestError("transport needs a type", "transport.type")
    return update
