"""Prefill and decode apart: a prefill server hands a prompt's KV over, a decode server fetches it and goes on."""

import asyncio
import logging

import aiohttp
import msgspec
from aiohttp import web

from headway.core.openai.requests import RequestError
from headway.core.protocol import FinishReason, GenerateRequest
from headway.inference.engine import Engine
from headway.inference.handover.tickets import Ticket
from headway.inference.handover.transfers import KvTransfer, as_transfer
from headway.inference.server.context import KEY, ServerContext
from headway.inference.server.requests import read_body
from headway.transport.tls import client_context

logger = logging.getLogger(__name__)
ROUTE = "/inference/v1/kv"
_BLOCKS_AT_A_TIME = 64
_FETCH_SECONDS = 30.0
"""After this long the rest of the prompt is computed here."""

_ROOM_SECONDS = 0.02


class KvRequest(msgspec.Struct):
    """A request for blocks, named in hex, by an engine that got `ticket` from this one; or, without names, for the KV
    that the ticket offers."""

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
    if context.role != "prefill" or not request.may_migrate or whole or continued:
        return False
    own = engine.hands_over_after(request)
    return own is not None and wanted > own


def cut_short(request: GenerateRequest, engine: Engine) -> GenerateRequest:
    """Leave all tokens but the first to another server."""
    own = engine.hands_over_after(request)
    request.sampling_params = msgspec.structs.replace(request.sampling_params, max_tokens=own)
    return engine.offering(request)


def ending_of(context: ServerContext, reason: FinishReason, *, handed_over: bool) -> FinishReason:
    """Name the ending of a request: one that another server can go on with migrates."""
    return "migrate" if handed_over and reason == "length" else context.name_ending(reason)


def ticket_for(
    context: ServerContext, reason: FinishReason | None, transfer: KvTransfer | None, *, handed_over: bool
) -> str | None:
    """Return the ticket that goes with a request that is handed over."""
    if not handed_over or reason != "migrate" or context.url is None or context.tickets is None:
        return None
    return context.tickets.issue(context.url, transfer)


async def send_blocks(http: web.Request) -> web.Response:
    """POST /inference/v1/kv: the blocks that are here, sealed, up to the first that is not. A ticket of KV that engines
    move themselves is taken up instead, once."""
    asked = await read_body(http, KvRequest)
    context, ticket = _issuer(http.app[KEY], asked.ticket)
    if ticket.transfer is not None:
        if not context.engine.offers.claim(ticket.transfer.key):
            raise RequestError("the KV on this ticket was taken, or is not kept any more", "ticket", 410)
        return web.Response(content_type="application/octet-stream")
    try:
        names = [bytes.fromhex(name) for name in asked.names[:_BLOCKS_AT_A_TIME]]
    except ValueError:
        raise RequestError("names must be hexadecimal", "names") from None
    contents = await context.engine.copy_blocks(names)
    sealed = [context.records.seal(name, content) for name, content in zip(names, contents, strict=False)]
    return web.Response(body=b"".join(sealed), content_type="application/octet-stream")


def _issuer(context: ServerContext, shown: str) -> tuple[ServerContext, Ticket]:
    """Find who was given a ticket: the run, or a tenant of the server. Raises RequestError where nobody was."""
    for holder in (context, *context.views.values()):
        ticket = None if holder.tickets is None else holder.tickets.read(shown)
        if ticket is not None and ticket.url == context.url:
            return holder, ticket
    raise RequestError("KV is given to those with a ticket of this server", "ticket", 401)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client_context()))


async def take_over(context: ServerContext, request: GenerateRequest, engine: Engine) -> GenerateRequest:
    """Fetch the KV of a prompt from the server that prefilled it. What does not come is computed here."""
    shown = request.kv_ticket
    ticket = None if shown is None or context.tickets is None else context.tickets.read(shown)
    if shown is None or ticket is None or ticket.url == context.url:
        return request
    try:
        async with asyncio.timeout(_FETCH_SECONDS), _session() as session:
            if ticket.transfer is not None:
                return await _claim(session, shown, ticket.url, ticket.transfer, request, engine)
            await _fetch_blocks(session, context, shown, ticket.url, request, engine)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        logger.info("KV of a prompt did not come from %s, so it is computed here: %s", ticket.url, reason)
    return request


async def _claim(
    session: aiohttp.ClientSession,
    shown: str,
    url: str,
    transfer: KvTransfer,
    request: GenerateRequest,
    engine: Engine,
) -> GenerateRequest:
    """Take up KV that this engine fetches itself, if it is that of these tokens under the weights that serve here."""
    if engine.kv_state(request) != transfer.state:
        logger.info("KV of a prompt from %s is not of these weights and tokens, so it is computed here", url)
        return request
    # The other engine holds the KV until it is fetched, and takes no new weights meanwhile.
    while not engine.has_room:  # noqa: ASYNC110 (requests end by themselves)
        await asyncio.sleep(_ROOM_SECONDS)
    async with session.post(url + ROUTE, data=msgspec.json.encode(KvRequest(shown, []))) as reply:
        reply.raise_for_status()
    return as_transfer(request, transfer.params, takes=transfer.state)


async def _fetch_blocks(
    session: aiohttp.ClientSession,
    context: ServerContext,
    shown: str,
    url: str,
    request: GenerateRequest,
    engine: Engine,
) -> None:
    names = await engine.missing_blocks(request)
    taken = 0
    while taken < len(names):
        part = names[taken : taken + _BLOCKS_AT_A_TIME]
        body = msgspec.json.encode(KvRequest(shown, [name.hex() for name in part]))
        async with session.post(url + ROUTE, data=body) as reply:
            reply.raise_for_status()
            data = await reply.read()
        contents = list(context.records.open_all(part, data, engine.block_bytes))
        adopted = await engine.adopt_blocks(request, part, contents)
        taken += adopted
        if adopted < len(part):
            return
