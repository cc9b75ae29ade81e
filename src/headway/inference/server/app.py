"""The application: routes and what they share."""

from weakref import WeakSet

from aiohttp import web

from headway.base.processes import is_loopback
from headway.core.openai.answers import model_card, new_id
from headway.core.openai.requests import MODEL_NOT_FOUND, Json, RequestError
from headway.inference.server import admin, tenants
from headway.inference.server.browsers import loopback_only
from headway.inference.server.chat import chat_completions
from headway.inference.server.completions import completions
from headway.inference.server.connections import ANSWERED, IN_FLIGHT, count_in_flight
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
    middlewares.append(tenants.tell_tenants_apart)
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
    app[KEY] = context
    app[READ_TIMEOUT] = read_timeout
    app[IN_FLIGHT], app[ANSWERED] = set(), WeakSet()
    app.on_response_prepare.append(name_response)
    app.add_routes(
        [
            web.get("/health", admin.health),
            web.get("/state", admin.state),
            web.get("/metrics", admin.metrics),
            web.get("/v1/models", models),
            web.get("/v1/models/{name:.+}", model),
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
            web.get("/tenants", admin.require_token(tenants.get_tenants)),
            web.put("/tenants", admin.require_token(tenants.put_tenants)),
        ]
    )
    return app


async def models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": _model_cards(context_of(request))})


async def model(request: web.Request) -> web.Response:
    context = context_of(request)
    name = request.match_info["name"]
    card = next((card for card in _model_cards(context) if card["id"] == name), None)
    if card is None:
        raise RequestError(f"model {name!r} does not exist", "model", 404, MODEL_NOT_FOUND)
    return json_response(card)


def _model_cards(context: ServerContext) -> list[Json]:
    engine = context.engine
    return [
        model_card(
            name,
            max_model_len=engine.max_model_len,
            version=version,
            root=context.folder,
            vocab_size=engine.vocab_size,
            tokenizer=context.tokenizer,
        )
        for name, version in context.models().items()
    ]


async def name_response(request: web.Request, response: web.StreamResponse) -> None:
    """Give every response an id, which OpenAI's client shows with errors."""
    response.headers["x-request-id"] = new_id("req")
