"""Prefill and decode apart: a prefill server hands a prompt's KV over, a decode server fetches it and goes on."""

import asyncio
import logging

import aiohttp
import msgspec
from aiohttp import web

from headway.core.openai import RequestError
from headway.core.protocol import FinishReason, GenerateRequest
from headway.inference.engine import Engine
from headway.inference.server.context import KEY, ServerContext
from headway.inference.server.requests import read_body
from headway.transport.tls import client_context

logger = logging.getLogger(__name__)
ROUTE = "/inference/v1/kv"
_BLOCKS_AT_A_TIME = 64
_FETCH_SECONDS = 30.0
"""After this long the rest of the prompt is computed here."""


class KvRequest(msgspec.Struct):
    """A request for blocks, named in hex, by an engine that got `ticket` from this one."""

    ticket: str
    names: list[str]


def hands_over(context: ServerContext, request: GenerateRequest, engine: Engine) -> bool:
    """Tell if this server leaves the request to another one after its first token."""
    params = request.sampling_params
    room = engine.max_model_len - len(request.token_ids)
    wanted = room if params.max_tokens is None else min(params.max_tokens, room)
    whole = params.n > 1 or params.prompt_logprobs is not None
    # One that was handed over already comes here where no server decodes.
    continued = request.kv_ticket is not None
    return context.role == "prefill" and request.may_migrate and wanted > 1 and not whole and not continued


def cut_short(request: GenerateRequest) -> None:
    """Leave all tokens but the first to another server."""
    request.sampling_params = msgspec.structs.replace(request.sampling_params, max_tokens=1)


def ending_of(context: ServerContext, reason: FinishReason, *, handed_over: bool) -> FinishReason:
    """Name the ending of a request: one that another server can go on with migrates."""
    return "migrate" if handed_over and reason == "length" else context.name_ending(reason)


def ticket_for(context: ServerContext, reason: FinishReason | None, *, handed_over: bool) -> str | None:
    """Return the ticket that goes with a request that is handed over."""
    if not handed_over or reason != "migrate" or context.url is None or context.tickets is None:
        return None
    return context.tickets.issue(context.url)


async def send_blocks(http: web.Request) -> web.Response:
    """POST /inference/v1/kv: the blocks that are here, sealed, up to the first that is not."""
    asked = await read_body(http, KvRequest)
    context = _issuer(http.app[KEY], asked.ticket)
    try:
        names = [bytes.fromhex(name) for name in asked.names[:_BLOCKS_AT_A_TIME]]
    except ValueError:
        raise RequestError("names must be hexadecimal", "names") from None
    contents = await context.engine.copy_blocks(names)
    sealed = [context.records.seal(name, content) for name, content in zip(names, contents, strict=False)]
    return web.Response(body=b"".join(sealed), content_type="application/octet-stream")


def _issuer(context: ServerContext, ticket: str) -> ServerContext:
    """Find who was given a ticket: the run, or a tenant of the server. Raises RequestError where nobody was."""
    for holder in (context, *context.views.values()):
        address = None if holder.tickets is None else holder.tickets.address(ticket)
        if address is not None and address == context.url:
            return holder
    raise RequestError("KV is given to those with a ticket of this server", "ticket", 401)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client_context()))


async def take_over(context: ServerContext, request: GenerateRequest, engine: Engine) -> None:
    """Fetch the KV of a prompt from the server that prefilled it. What does not come is computed here."""
    ticket = request.kv_ticket
    url = None if ticket is None or context.tickets is None else context.tickets.address(ticket)
    if ticket is None or url is None or url == context.url:
        return
    names = await engine.missing_blocks(request)
    taken = 0
    try:
        async with asyncio.timeout(_FETCH_SECONDS), _session() as session:
            while taken < len(names):
                part = names[taken : taken + _BLOCKS_AT_A_TIME]
                body = msgspec.json.encode(KvRequest(ticket, [name.hex() for name in part]))
                async with session.post(url + ROUTE, data=body) as reply:
                    reply.raise_for_status()
                    data = await reply.read()
                contents = list(context.records.open_all(part, data, engine.block_bytes))
                adopted = await engine.adopt_blocks(request, part, contents)
                taken += adopted
                if adopted < len(part):
                    break
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        logger.info("KV of a prompt did not come from %s, so it is computed here: %s", url, reason)
