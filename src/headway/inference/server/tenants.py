"""Tenants at the server: whose request it is, what they may ask for, and the routes by which the host names them."""

import hmac

from aiohttp import web

from headway.core.openai.requests import RequestError
from headway.core.tenants import TenantGrant, TenantUse
from headway.inference.errors import LoadingError
from headway.inference.server.context import KEY, VIEW, ServerContext
from headway.inference.server.handover import ROUTE
from headway.inference.server.requests import read_body
from headway.inference.server.responses import Handler, json_response

_OPEN = frozenset({"/health", ROUTE})
"""Routes without a token: KV is given to those with a ticket, which is a token of its own."""
_THEIRS = frozenset(
    {
        ("GET", "/health"),
        ("GET", "/state"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{name}"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/inference/v1/generate"),
        ("POST", ROUTE),
        ("POST", "/v1/abort"),
        ("GET", "/weights"),
        ("POST", "/adapters"),
        ("DELETE", "/adapters/{name}"),
    }
)
"""Routes of tenants, each about their own adapter and requests only."""


_METRICS = (
    ("running", "gauge", "Sequences of a tenant that run"),
    ("waiting", "gauge", "Requests of a tenant in line"),
    ("prompt_tokens", "counter", "Prompt tokens of a tenant's requests"),
    ("tokens", "counter", "Tokens sampled for a tenant"),
    ("queue_seconds", "counter", "Seconds that a tenant's requests waited for their turn, added up"),
    ("refused", "counter", "Requests of a tenant that found its line full"),
)


def bearer(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


def is_admin(context: ServerContext, token: str) -> bool:
    # Bytes of a header that are no text come as surrogates.
    given = token.encode(errors="surrogateescape")
    return context.token is not None and hmac.compare_digest(given, context.token.encode())


@web.middleware
async def tell_tenants_apart(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Show each tenant its own view of the server, and admins all. Without tenants, let everybody through."""
    context, token = request.app[KEY], bearer(request)
    if not context.grants.active or is_admin(context, token):
        return await handler(request)
    name = context.grants.holder(token) if token else None
    if name is None:
        if request.path in _OPEN:
            return await handler(request)
        if context.grants.awaited:
            # One that was started again: a reply that its death broke off has to go on, and not to fail.
            raise LoadingError("the host has not said yet who its tenants are", retry_after=1)
        raise RequestError("this server has tenants: show the bearer token of one", status=401)
    resource = request.match_info.route.resource
    route = (request.method.replace("HEAD", "GET"), "" if resource is None else resource.canonical)
    if resource is not None and route not in _THEIRS:
        raise RequestError(
            f"{route[0]} {route[1]} is the host's: tenant {name} shares this server with others", status=403
        )
    request[VIEW] = context.view(name)
    return await handler(request)


async def get_tenants(request: web.Request) -> web.Response:
    context = request.app[KEY]
    return json_response([_use(context, name) for name in context.grants.names])


async def put_tenants(request: web.Request) -> web.Response:
    """Replace all grants. The adapters and requests of tenants that are gone go, too."""
    context = request.app[KEY]
    engine = context.engine
    for name in context.grants.replace(await read_body(request, list[TenantGrant])):
        if (view := context.views.pop(name, None)) is not None:
            view.tenant.abort_all()
        await engine.drop_adapter(name)
    return await get_tenants(request)


def tenant_metrics(context: ServerContext) -> list[str]:
    """Lines of Prometheus text about each tenant; none where there are none."""
    uses = [_use(context, name) for name in context.grants.names]
    lines = []
    for field, kind, text in _METRICS if uses else ():
        full = f"headway_tenant_{field}_total" if kind == "counter" else f"headway_tenant_{field}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        lines += [f'{full}{{tenant="{use.name}"}} {getattr(use, field)}' for use in uses]
    return lines


def _use(context: ServerContext, name: str) -> TenantUse:
    tenant = context.view(name).tenant
    admission = context.admission
    assert admission is not None
    return TenantUse(
        name=name,
        weight=context.grants.weight(name),
        version=None if tenant.adapter is None else tenant.adapter.version,
        running=admission.shares.running_of(name),
        waiting=admission.shares.waiting_of(name),
        prompt_tokens=tenant.prompt_tokens,
        tokens=tenant.tokens,
        queue_seconds=admission.queue_seconds[name],
        refused=admission.refused[name],
    )
