"""The application: routes and what they share."""

import time

from aiohttp import web

from headway.core.processes import is_loopback
from headway.inference.server import admin
from headway.inference.server.browsers import loopback_only
from headway.inference.server.chat import chat_completions
from headway.inference.server.completions import completions
from headway.inference.server.connections import IN_FLIGHT, count_in_flight
from headway.inference.server.context import KEY, ServerContext, context_of
from headway.inference.server.generate import generate
from headway.inference.server.handover import ROUTE, send_blocks
from headway.inference.server.requests import READ_TIMEOUT
from headway.inference.server.responses import errors_as_json, json_response

MAX_BODY = 64 * 2**20
_READ_SECONDS = 60.0


def build_app(
    context: ServerContext, host: str = "127.0.0.1", *, read_timeout: float = _READ_SECONDS
) -> web.Application:
    """The routes of the inference protocol around the engine that `context` has or will have.

    `host` is the address that the application will listen at; a body must arrive within `read_timeout` seconds.
    """
    middlewares = [count_in_flight, errors_as_json, *([loopback_only] if is_loopback(host) else [])]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
    app[KEY] = context
    app[READ_TIMEOUT] = read_timeout
    app[IN_FLIGHT] = set()
    app.add_routes(
        [
            web.get("/health", admin.health),
            web.get("/state", admin.state),
            web.get("/metrics", admin.metrics),
            web.get("/v1/models", models),
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/inference/v1/generate", generate),
            web.post(ROUTE, send_blocks),
            web.post("/v1/abort", admin.abort),
            web.get("/weights", admin.require_token(admin.get_weights)),
            web.post("/weights", admin.require_token(admin.post_weights)),
            web.post("/adapters", admin.require_token(admin.post_adapter)),
            web.delete("/adapters/{name}", admin.require_token(admin.delete_adapter)),
            web.post("/pause", admin.require_token(admin.pause)),
            web.post("/resume", admin.require_token(admin.resume)),
        ]
    )
    return app


async def models(request: web.Request) -> web.Response:
    context = context_of(request)
    engine = context.engine
    created = int(time.time())
    cards = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "headway",
            "max_model_len": engine.max_model_len,
            "version": version,
            "root": context.folder,
            "vocab_size": engine.vocab_size,
            "tokenizer": context.tokenizer,
        }
        for name, version in engine.models().items()
    ]
    return json_response({"object": "list", "data": cards})
